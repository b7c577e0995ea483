# Helpers for every component. Warnings are errors for our targets only, not for third-party code.

include(CheckCXXCompilerFlag)
include(CheckPIESupported)

find_program(ROPETEAM_CCACHE ccache)
if(ROPETEAM_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${ROPETEAM_CCACHE})
  set(CMAKE_C_COMPILER_LAUNCHER ${ROPETEAM_CCACHE})
endif()

if(ROPETEAM_SANITIZE)
  add_compile_options(-fsanitize=${ROPETEAM_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${ROPETEAM_SANITIZE})
endif()

# ropeteam_harden(NAME): what makes an overflow end the process instead of running an attacker's code. Not with sanitizers,
# which replace the functions that FORTIFY checks.
check_pie_supported()
check_cxx_compiler_flag(-fcf-protection ROPETEAM_HAS_CF_PROTECTION)
function(ropeteam_harden name)
  if(ROPETEAM_SANITIZE)
    return()
  endif()
  target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:C,CXX>:-fstack-protector-strong>
    $<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:C,CXX>>:-U_FORTIFY_SOURCE;-D_FORTIFY_SOURCE=2>)
  if(ROPETEAM_HAS_CF_PROTECTION)
    target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:C,CXX>:-fcf-protection>)
  endif()
  get_target_property(type ${name} TYPE)
  if(NOT type STREQUAL "STATIC_LIBRARY")
    target_link_options(${name} PRIVATE -Wl,-z,relro,-z,now)
  endif()
endfunction()

# ropeteam_target(NAME): for what is installed: the settings of ropeteam_common(), hardened.
function(ropeteam_target name)
  ropeteam_common(${name})
  ropeteam_harden(${name})
endfunction()

# ropeteam_common(NAME): sets our warnings, and the repository root as include path, so that every include names its
# component.
function(ropeteam_common name)
  target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR})
  # Warnings are errors with g++ only. clang, which builds the fuzz targets, has other warnings in each
  # version.
  target_compile_options(${name} PRIVATE -Wall -Wextra $<$<CXX_COMPILER_ID:GNU>:-Werror>
    $<$<COMPILE_LANGUAGE:CXX>:-Wconversion> $<$<COMPILE_LANGUAGE:CXX>:-Wno-sign-conversion>)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # GCC 12 warns wrongly of overlaps in std::string's operator+ (GCC bug 105651).
    target_compile_options(${name} PRIVATE -Wno-restrict)
  endif()
  if(ROPETEAM_SANITIZE AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # With sanitizers GCC warns wrongly that members of inactive std::variant alternatives are read
    # uninitialized.
    target_compile_options(${name} PRIVATE -Wno-maybe-uninitialized)
  endif()
  if(ROPETEAM_SANITIZE MATCHES "thread")
    # GCC warns that the thread sanitizer does not model std::atomic_thread_fence. Our fences only order
    # against DMA.
    target_compile_options(${name} PRIVATE -Wno-error=tsan)
  endif()
endfunction()

# ropeteam_library(NAME SOURCES...): adds a static library.
function(ropeteam_library name)
  add_library(${name} STATIC ${ARGN})
  ropeteam_target(${name})
endfunction()

# ropeteam_compile_quickly(NAME): for programs that run once or mostly wait. Full optimization takes a third
# of the compile time.
function(ropeteam_compile_quickly name)
  target_compile_options(${name} PRIVATE $<$<CONFIG:Release>:-O1>)
endfunction()

# ropeteam_test(NAME SOURCES... LIBS libs... [TIMEOUT seconds]): adds a GoogleTest binary; each case is a test
# of ctest.
function(ropeteam_test name)
  cmake_parse_arguments(T "" "TIMEOUT" "LIBS" ${ARGN})
  if(NOT T_TIMEOUT)
    set(T_TIMEOUT 120)
  endif()
  add_executable(${name} ${T_UNPARSED_ARGUMENTS})
  ropeteam_common(${name})
  ropeteam_compile_quickly(${name})
  target_link_libraries(${name} PRIVATE ${T_LIBS} GTest::gmock GTest::gtest_main Threads::Threads)
  if(ROPETEAM_SANITIZE MATCHES "thread")
    # UCX intercepts madvise() with locks that the thread sanitizer tracks. At the end of a thread glibc calls
    # madvise() for its stack after the sanitizer has deleted the thread's state, which crashes.
    set_target_properties(${name} PROPERTIES CROSSCOMPILING_EMULATOR "env;UCX_MEM_EVENTS=n")
  endif()
  gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT ${T_TIMEOUT})
endfunction()
