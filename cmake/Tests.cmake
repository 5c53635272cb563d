# snapkv-tests: native/tests/*.cpp, one plain program each, registered with CTest, run in the build folder
# llama-pristine: libllama from upstream's own sources, against the same ggml, in <build>/pristine

add_custom_target(snapkv-tests)

file(GLOB tests CONFIGURE_DEPENDS native/tests/*.cpp)
foreach(file IN LISTS tests)
    get_filename_component(name ${file} NAME_WE)
    add_executable(${name} EXCLUDE_FROM_ALL ${file})
    # internal headers too: libllama exports all symbols
    target_include_directories(${name} PRIVATE native vendor/llama.cpp/src)
    target_link_libraries(${name} PRIVATE llama)
    target_compile_features(${name} PRIVATE cxx_std_17)
    set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
    add_dependencies(snapkv-tests ${name})
    add_test(NAME ${name} COMMAND ${name})
endforeach()

# Everything is compiled again: taking over target llama's objects of src/models would save a quarter of the time (23 of
# 90 seconds on two cores), but they were compiled with the patched headers.
set(pristine ${PROJECT_SOURCE_DIR}/vendor/llama.cpp-pristine)
get_target_property(sources llama SOURCES)
list(FILTER sources EXCLUDE REGEX "^${PROJECT_SOURCE_DIR}/native/")
list(TRANSFORM sources REPLACE "^${PROJECT_SOURCE_DIR}/vendor/llama.cpp/src/" "")
set(core ${sources})
list(FILTER core EXCLUDE REGEX "^models/")
list(TRANSFORM sources PREPEND ${pristine}/src/)
list(TRANSFORM core PREPEND ${pristine}/src/)

add_library(llama-pristine SHARED EXCLUDE_FROM_ALL ${sources})
set_source_files_properties(${core} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
set_target_properties(llama-pristine PROPERTIES
    OUTPUT_NAME llama
    LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/pristine
    POSITION_INDEPENDENT_CODE ON
    UNITY_BUILD ON
    UNITY_BUILD_BATCH_SIZE 16)
get_target_property(binary_dir llama BINARY_DIR) # llama-version.h
target_include_directories(llama-pristine PRIVATE ${pristine}/src ${binary_dir} PUBLIC ${pristine}/include)
target_compile_features(llama-pristine PRIVATE cxx_std_17)
target_compile_definitions(llama-pristine PRIVATE LLAMA_BUILD LLAMA_SHARED)
target_link_libraries(llama-pristine PUBLIC ggml)

# its RPATH is its own folder, and so is where the Python bindings look
foreach(target IN ITEMS ggml ggml-base ${GGML_AVAILABLE_BACKENDS})
    add_custom_command(TARGET llama-pristine POST_BUILD
        COMMAND ${CMAKE_COMMAND} -E create_symlink $<TARGET_FILE:${target}> $<TARGET_FILE_DIR:llama-pristine>/$<TARGET_FILE_NAME:${target}>)
endforeach()
