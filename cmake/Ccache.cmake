# ccache where it is installed, unless the user chose a launcher. Paths below this folder are hashed relative to it, so
# that another clone hits too. `env` and not `cmake -E env`: pip's isolated cmake lies elsewhere each time, and a changed
# command line compiles everything again.

find_program(SNAPKV_CCACHE ccache)
find_program(SNAPKV_ENV env)
mark_as_advanced(SNAPKV_CCACHE SNAPKV_ENV)

if(SNAPKV_CCACHE AND SNAPKV_ENV)
    foreach(lang C CXX CUDA HIP OBJC OBJCXX)
        if(NOT DEFINED CMAKE_${lang}_COMPILER_LAUNCHER)
            set(CMAKE_${lang}_COMPILER_LAUNCHER
                ${SNAPKV_ENV} CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${SNAPKV_CCACHE})
        endif()
    endforeach()
endif()
