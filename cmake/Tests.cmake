# snapkv-tests: native/tests/*.cpp, one plain program each, registered with CTest, run in the build folder
# llama-pristine: libllama from upstream's own sources, against the same ggml, in <build>/pristine
# llama-server-pristine: the same of llama-server and the libraries between them

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

# upstream's writer of a small random model of every architecture, for tests/archs
add_executable(test-llama-archs EXCLUDE_FROM_ALL vendor/llama.cpp/tests/test-llama-archs.cpp)
target_link_libraries(test-llama-archs PRIVATE llama llama-common)
set_target_properties(test-llama-archs PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)

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

find_package(Threads REQUIRED)

# a target of upstream's CMake files once more, from the pristine sources
function(snapkv_pristine name)
    set(upstream ${PROJECT_SOURCE_DIR}/vendor/llama.cpp)
    set(twins llama llama-common server-context llama-server-impl)

    get_target_property(source_dir ${name} SOURCE_DIR)
    get_target_property(sources    ${name} SOURCES)
    list(FILTER sources EXCLUDE REGEX "^${PROJECT_SOURCE_DIR}/native/")
    list(TRANSFORM sources PREPEND ${source_dir}/ REGEX "^[^/]")

    foreach(property IN ITEMS INCLUDE_DIRECTORIES INTERFACE_INCLUDE_DIRECTORIES COMPILE_DEFINITIONS INTERFACE_COMPILE_DEFINITIONS LINK_LIBRARIES)
        get_target_property(${property} ${name} ${property})
        if(NOT ${property})
            set(${property} "")
        endif()
        list(FILTER ${property} EXCLUDE REGEX "^${PROJECT_SOURCE_DIR}/native")
    endforeach()
    foreach(twin IN LISTS twins)
        list(TRANSFORM LINK_LIBRARIES REPLACE "^${twin}$" "${twin}-pristine")
    endforeach()
    list(TRANSFORM LINK_LIBRARIES REPLACE "^mtmd$" "$<TARGET_FILE:mtmd>") # not what it links to: our libllama
    foreach(folder IN ITEMS include common tools/server)
        list(TRANSFORM sources                       REPLACE "^${upstream}/${folder}/"       "${pristine}/${folder}/")
        list(TRANSFORM INCLUDE_DIRECTORIES           REPLACE "^${upstream}/${folder}(/\\.)?$" "${pristine}/${folder}")
        list(TRANSFORM INTERFACE_INCLUDE_DIRECTORIES REPLACE "^${upstream}/${folder}(/\\.)?$" "${pristine}/${folder}")
    endforeach()

    get_target_property(type ${name} TYPE)
    if(type STREQUAL EXECUTABLE)
        add_executable(${name}-pristine EXCLUDE_FROM_ALL ${sources})
    elseif(type STREQUAL STATIC_LIBRARY)
        add_library(${name}-pristine STATIC EXCLUDE_FROM_ALL ${sources})
    else()
        add_library(${name}-pristine SHARED EXCLUDE_FROM_ALL ${sources})
    endif()
    set_target_properties(${name}-pristine PROPERTIES
        OUTPUT_NAME ${name}
        LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/pristine
        ARCHIVE_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/pristine
        RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/pristine
        POSITION_INDEPENDENT_CODE     ON
        INCLUDE_DIRECTORIES           "${INCLUDE_DIRECTORIES}"
        INTERFACE_INCLUDE_DIRECTORIES "${INTERFACE_INCLUDE_DIRECTORIES}"
        COMPILE_DEFINITIONS           "${COMPILE_DEFINITIONS}"
        INTERFACE_COMPILE_DEFINITIONS "${INTERFACE_COMPILE_DEFINITIONS}")
    target_compile_features(${name}-pristine PUBLIC cxx_std_17)
    target_link_libraries(${name}-pristine PUBLIC ${LINK_LIBRARIES})
endfunction()

snapkv_pristine(llama-common)
snapkv_pristine(server-context)
snapkv_pristine(llama-server-impl)
snapkv_pristine(llama-server)
add_dependencies(server-context-pristine mtmd)
add_dependencies(llama-server-impl-pristine llama-ui-assets)

# its RPATH is its own folder, and so is where the Python bindings look
function(snapkv_link_beside target)
    foreach(library IN LISTS ARGN)
        add_custom_command(TARGET ${target} POST_BUILD
            COMMAND ${CMAKE_COMMAND} -E create_symlink $<TARGET_FILE:${library}> $<TARGET_FILE_DIR:${target}>/$<TARGET_FILE_NAME:${library}>)
    endforeach()
endfunction()

snapkv_link_beside(llama-pristine ggml ggml-base ${GGML_AVAILABLE_BACKENDS})
snapkv_link_beside(llama-server-pristine mtmd)
