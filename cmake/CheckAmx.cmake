# Some virtual machines announce AMX and then fault on its first instruction, and ggml takes the announcement for
# granted when it is built for the machine at hand (GGML_NATIVE). Try it, and build ggml without AMX where it fails.

if(NOT GGML_NATIVE OR CMAKE_CROSSCOMPILING OR MSVC OR NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$" OR NOT TARGET ggml-cpu)
    return()
endif()

if(NOT DEFINED SNAPKV_AMX_RUN)
    try_run(SNAPKV_AMX_RUN SNAPKV_AMX_COMPILES "${CMAKE_BINARY_DIR}/check-amx" "${CMAKE_CURRENT_LIST_DIR}/check-amx.c"
        COMPILE_DEFINITIONS -march=native)
    set(SNAPKV_AMX_RUN "${SNAPKV_AMX_RUN}" CACHE INTERNAL "exit code of check-amx.c")
endif()

if(NOT SNAPKV_AMX_RUN EQUAL 0)
    message(STATUS "AMX is announced but does not work here: ggml is built without it")
    target_compile_options(ggml-cpu PRIVATE -mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
endif()
