# vendor/llama.cpp: the pinned llama.cpp with our patches; vendor_llama.py does the work and says in one line what went wrong

find_package(Python 3.10 COMPONENTS Interpreter QUIET)
if(NOT Python_Interpreter_FOUND)
    snapkv_fatal("snapkv-gguf: no Python >= 3.10 found to unpack llama.cpp with; install one or set -DPython_EXECUTABLE=...")
endif()

execute_process(
    COMMAND ${CMAKE_COMMAND} -E env PYTHONDONTWRITEBYTECODE=1
            ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/vendor_llama.py "--source=${SNAPKV_LLAMA_SOURCE}"
    RESULT_VARIABLE result
    ERROR_VARIABLE  error
    ERROR_STRIP_TRAILING_WHITESPACE)
if(NOT result EQUAL 0)
    snapkv_fatal("${error}")
endif()

file(GLOB patches CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/patches/*.patch)
set(pin ${PROJECT_SOURCE_DIR}/vendor/llama.cpp.toml)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${patches} ${pin} ${CMAKE_CURRENT_LIST_DIR}/vendor_llama.py)

file(STRINGS ${pin} line REGEX "^commit *=")
string(REGEX REPLACE "^[^\"]*\"([0-9a-f]+)\".*" "\\1" SNAPKV_LLAMA_COMMIT "${line}")
