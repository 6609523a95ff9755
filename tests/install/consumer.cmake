# Installs the built tree into an empty prefix and builds examples/sparse_decode.cc against it, as
# somebody else's project would: cmake -DBUILD=... -DSOURCE=... -DWORK=... -P consumer.cmake
function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE code OUTPUT_VARIABLE text ERROR_VARIABLE text)
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "${ARGV}\n${text}")
  endif()
endfunction()

file(REMOVE_RECURSE ${WORK})
file(WRITE ${WORK}/project/CMakeLists.txt
"cmake_minimum_required(VERSION 3.24)
project(consumer CXX)
find_package(lacuna 0.1 REQUIRED)
add_executable(consumer ${SOURCE}/examples/sparse_decode.cc)
target_link_libraries(consumer PRIVATE lacuna::lacuna)
")
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)
run(${CMAKE_COMMAND} -S ${WORK}/project -B ${WORK}/build -G ${GENERATOR}
    -DCMAKE_PREFIX_PATH=${WORK}/prefix -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_BUILD_TYPE=Release)
run(${CMAKE_COMMAND} --build ${WORK}/build)
run(${WORK}/build/consumer)
message(STATUS "an installed lacuna::lacuna builds and runs another project")
