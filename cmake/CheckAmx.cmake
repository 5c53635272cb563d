# Some versions of GCC miscompile the tile configuration of ggml's AMX kernels, which then fault at their first use, and
# ggml takes AMX for granted when it is built for the machine at hand (GGML_NATIVE). Try it, and build ggml-cpu without
# AMX where it fails. See check-amx.c.

if(NOT GGML_NATIVE OR CMAKE_CROSSCOMPILING OR MSVC OR NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$" OR NOT TARGET ggml-cpu)
    return()
endif()

if(NOT DEFINED SNAPKV_AMX_RUN)
    try_run(run compiled "${CMAKE_BINARY_DIR}/check-amx" "${CMAKE_CURRENT_LIST_DIR}/check-amx.c"
        COMPILE_DEFINITIONS -march=native -O2)
    set(SNAPKV_AMX_RUN "${run}" CACHE INTERNAL "exit code of check-amx.c")
endif()

if(NOT SNAPKV_AMX_RUN EQUAL 0)
    message(STATUS "AMX does not work with this compiler and machine: ggml-cpu is built without it")
    target_compile_options(ggml-cpu PRIVATE -mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
endif()
