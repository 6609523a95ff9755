# Decides whether CUDA code is built: LACUNA_CUDA = ON, OFF or AUTO (when nvcc is found).
set(LACUNA_HAVE_CUDA OFF)
if(NOT LACUNA_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    # Named before the language is enabled, so that no GPU is needed to configure.
    if(NOT CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 80-real 90a-real 100-real 120)
    endif()
    enable_language(CUDA)
    # CMake before 3.26 does not know that nvcc 12 and later have C++20.
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
    endif()
    # std::bit_cast and the like in device code.
    string(APPEND CMAKE_CUDA_FLAGS " --expt-relaxed-constexpr")
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(LACUNA_HAVE_CUDA ON)
  elseif(LACUNA_CUDA STREQUAL "ON")
    message(FATAL_ERROR "LACUNA_CUDA is ON but no CUDA compiler was found: put nvcc on PATH, or use LACUNA_CUDA=OFF")
  endif()
endif()
message(STATUS "Lacuna: CUDA code ${LACUNA_HAVE_CUDA}")

# lacuna_cuda_library(NAME sources... LINK targets...): a library of host and device sources. Spills,
# local memory and whatever else ptxas warns of are errors; so are its advisories C75xx ("wgmma
# serialized" and the like), which no flag turns into errors: tools/nvcc_strict.py looks for them.
set(LACUNA_CUDA_FLAGS
    -Werror=all-warnings -Xptxas=--warn-on-spills,--warn-on-local-memory-usage,--warning-as-error
    -Xcompiler=-Wall,-Wextra,-Wno-missing-field-initializers,-Wno-unused-parameter)

function(lacuna_cuda_library name)
  cmake_parse_arguments(ARG "" "" "LINK" ${ARGN})
  add_library(${name} STATIC ${ARG_UNPARSED_ARGUMENTS})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR})
  target_include_directories(${name} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>)
  target_compile_options(${name} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:${LACUNA_WARNINGS} ${LACUNA_SANITIZE_FLAGS}>
    $<$<COMPILE_LANGUAGE:CUDA>:${LACUNA_CUDA_FLAGS}>)
  target_compile_features(${name} PUBLIC cxx_std_20)
  target_link_libraries(${name} PUBLIC ${ARG_LINK})
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  set_target_properties(${name} PROPERTIES CUDA_COMPILER_LAUNCHER
    "${Python3_EXECUTABLE};${PROJECT_SOURCE_DIR}/tools/nvcc_strict.py")
  if(CMAKE_CUDA_COMPILER_LAUNCHER)
    set_property(TARGET ${name} APPEND PROPERTY CUDA_COMPILER_LAUNCHER
      ${CMAKE_CUDA_COMPILER_LAUNCHER})
  endif()
endfunction()
