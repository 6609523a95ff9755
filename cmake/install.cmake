# What `cmake --install` lays down: the public headers, the kernel library, and a package so that
#   find_package(lacuna)  and  target_link_libraries(... lacuna::lacuna)
# work elsewhere. The engine stays in the tree: it is a program, not yet a library for others.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(LACUNA_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/lacuna)

set_target_properties(lacuna_kernels PROPERTIES EXPORT_NAME lacuna)
set(LACUNA_INSTALLED lacuna_core lacuna_ops lacuna_cpu lacuna_kernels)
if(LACUNA_HAVE_CUDA)
  list(APPEND LACUNA_INSTALLED lacuna_cuda lacuna_sm90)
endif()
install(TARGETS ${LACUNA_INSTALLED}
        EXPORT lacuna
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY include/lacuna DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN *.h)
install(EXPORT lacuna NAMESPACE lacuna:: FILE lacuna-targets.cmake DESTINATION ${LACUNA_PACKAGE_DIR})
configure_package_config_file(cmake/lacuna-config.cmake.in ${PROJECT_BINARY_DIR}/lacuna-config.cmake
                              INSTALL_DESTINATION ${LACUNA_PACKAGE_DIR})
# Before 1.0 every minor version may break its users.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/lacuna-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES cmake/FindOneDNN.cmake ${PROJECT_BINARY_DIR}/lacuna-config.cmake
              ${PROJECT_BINARY_DIR}/lacuna-config-version.cmake
        DESTINATION ${LACUNA_PACKAGE_DIR})
