# what goes into the package: snapkv_gguf/lib and snapkv_gguf/licenses, all in the component "snapkv"

set(targets llama mtmd llama-common llama-server-impl llama-cli-impl ggml ggml-base ${GGML_AVAILABLE_BACKENDS})
foreach(target IN LISTS targets)
    # a wheel holds no symlinks: one file per library, no version in the SONAME
    set_property(TARGET ${target} PROPERTY VERSION)
    set_property(TARGET ${target} PROPERTY SOVERSION)
    set_property(TARGET ${target} PROPERTY PUBLIC_HEADER)
    set_property(TARGET ${target} PROPERTY PRIVATE_HEADER)
endforeach()

list(APPEND targets llama-server llama-cli)
if(TARGET ggml-rpc-server) # with GGML_RPC
    list(APPEND targets ggml-rpc-server)
endif()

add_custom_target(snapkv-package ALL)
add_dependencies(snapkv-package ${targets})

install(TARGETS ${targets}
    LIBRARY DESTINATION snapkv_gguf/lib COMPONENT snapkv
    RUNTIME DESTINATION snapkv_gguf/lib COMPONENT snapkv)

#
# licences of what is compiled in
#

set(licenses ${PROJECT_BINARY_DIR}/licenses)
file(MAKE_DIRECTORY ${licenses})

function(snapkv_license name file)
    configure_file(${PROJECT_SOURCE_DIR}/${file} ${licenses}/${name}.txt COPYONLY)
endfunction()

# some headers hold their licence in the comment that begins with `start`
function(snapkv_license_comment name file start)
    file(READ ${PROJECT_SOURCE_DIR}/${file} text)
    string(FIND "${text}" "${start}" begin)
    if(begin EQUAL -1)
        snapkv_fatal("snapkv-gguf: no licence that begins with '${start}' in ${file}; correct cmake/Install.cmake")
    endif()
    string(SUBSTRING "${text}" ${begin} -1 text)
    string(REGEX MATCH "^(//[^\n]*\n)+" comment "${text}") # a block of // lines, else the rest of a /* comment
    if(NOT comment)
        string(FIND "${text}" "*/" end)
        string(SUBSTRING "${text}" 0 ${end} comment)
    endif()
    file(WRITE ${licenses}/${name}.txt "${comment}\n")
endfunction()

set(llama vendor/llama.cpp)
snapkv_license(snapkv-gguf   LICENSE)
snapkv_license(llama.cpp     ${llama}/LICENSE)
snapkv_license(cpp-httplib   ${llama}/vendor/cpp-httplib/LICENSE)
snapkv_license(nlohmann-json ${llama}/licenses/LICENSE-jsonhpp)
snapkv_license(rotate-bits   ${llama}/vendor/hash/rotate-bits/LICENSE.md)
snapkv_license(sha256        ${llama}/vendor/hash/sha256/LICENSE)
snapkv_license(xxhash        ${llama}/vendor/hash/xxhash/LICENSE)
snapkv_license_comment(llamafile    ${llama}/ggml/src/ggml-cpu/llamafile/sgemm.cpp "// Copyright 2024 Mozilla Foundation")
snapkv_license_comment(sha1         ${llama}/vendor/hash/sha1/sha1.c         "SHA-1 in C")
snapkv_license_comment(subprocess.h ${llama}/vendor/sheredom/subprocess.h    "   This is free and unencumbered software")
snapkv_license_comment(stb_image    ${llama}/vendor/stb/stb_image.h          "This software is available under 2 licenses")
snapkv_license_comment(miniaudio    ${llama}/vendor/miniaudio/miniaudio.h    "This software is available as a choice")

install(DIRECTORY ${licenses} DESTINATION snapkv_gguf COMPONENT snapkv)
install(FILES vendor/llama.cpp.toml DESTINATION snapkv_gguf COMPONENT snapkv)
