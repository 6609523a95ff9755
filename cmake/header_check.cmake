# Every header compiles by itself: one generated source a header, that includes it and nothing else.
file(GLOB_RECURSE headers CONFIGURE_DEPENDS
     RELATIVE ${PROJECT_SOURCE_DIR}
     ${PROJECT_SOURCE_DIR}/include/*.h ${PROJECT_SOURCE_DIR}/src/*.h ${PROJECT_SOURCE_DIR}/tests/*.h)
# Bodies that Highway compiles once a target; they mean nothing outside their source file.
list(FILTER headers EXCLUDE REGEX "-inl\\.h$")
# The headers of the GPU backends want CUDA's own.
if(NOT LACUNA_HAVE_CUDA)
  list(FILTER headers EXCLUDE REGEX "^src/backends/(cuda|sm90)/")
endif()
set(header_sources "")
foreach(header IN LISTS headers)
  string(REGEX REPLACE "^(include|src|tests)/" "" name ${header})
  set(source ${PROJECT_BINARY_DIR}/header_check/${header}.cc)
  file(CONFIGURE OUTPUT ${source} CONTENT "#include \"${name}\"\n#include \"${name}\"\n")
  list(APPEND header_sources ${source})
endforeach()
add_library(lacuna_header_check OBJECT ${header_sources})
lacuna_target(lacuna_header_check)
target_include_directories(lacuna_header_check PRIVATE ${PROJECT_SOURCE_DIR}/tests)
target_compile_definitions(lacuna_header_check PRIVATE LACUNA_SOURCE_DIR="")
target_compile_options(lacuna_header_check PRIVATE -O0)
target_link_libraries(lacuna_header_check PRIVATE GTest::gtest)
if(LACUNA_HAVE_CUDA)
  find_package(CUDAToolkit REQUIRED)
  target_include_directories(lacuna_header_check SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
endif()
