# cmake --install BUILD --prefix DIR installs the programs, the library with its header, and the Python
# package. They find each other in any DIR: programs by their own path (api/cli/programs.cc), the bench its
# library by a relative run path, and the package its library two folders up (api/python/ropeteam/_native.py).
# The bench has one run path for both places. If they differed, CMake would fill up the shorter one with colons, and
# an empty element of a run path is the current directory.
# Component "wheel": the files that pyproject.toml puts into ropeteam/ of a wheel. A wheel cannot contain
# symbolic links, so the library is one file there.
include(GNUInstallDirs)

foreach(program ropeteamd ropeteam-cli ropeteam-bench)
  if(TARGET ${program})
    set(component wheel)
    if(program STREQUAL ropeteam-bench)
      set_target_properties(${program} PROPERTIES BUILD_WITH_INSTALL_RPATH ON
        INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR};$ORIGIN/../api/client")
      set(component bench)
    endif()
    install(TARGETS ${program} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT ${component})
  endif()
endforeach()
if(TARGET ropeteam)
  install(TARGETS ropeteam LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(FILES $<TARGET_FILE:ropeteam> RENAME libropeteam.so DESTINATION lib COMPONENT wheel EXCLUDE_FROM_ALL)
  install(FILES ${PROJECT_SOURCE_DIR}/api/include/ropeteam/ropeteam.h
          DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ropeteam)
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/api/python/ropeteam
          DESTINATION ${CMAKE_INSTALL_LIBDIR}/ropeteam/python
          FILES_MATCHING PATTERN "*.py" PATTERN "py.typed" PATTERN "__pycache__" EXCLUDE)
endif()
