# Helpers shared by every component. Warnings are errors on our targets only, never on what we include.

find_program(ROPETEAM_CCACHE ccache)
if(ROPETEAM_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${ROPETEAM_CCACHE})
  set(CMAKE_C_COMPILER_LAUNCHER ${ROPETEAM_CCACHE})
endif()

if(ROPETEAM_SANITIZE)
  add_compile_options(-fsanitize=${ROPETEAM_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${ROPETEAM_SANITIZE})
endif()

# ropeteam_target(NAME): our warnings and the repository root as include path, so that every include names its component.
function(ropeteam_target name)
  target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR})
  # g++ is the compiler that the warnings are kept to; clang, which builds the fuzz targets, has others in each version.
  target_compile_options(${name} PRIVATE -Wall -Wextra $<$<CXX_COMPILER_ID:GNU>:-Werror>
    $<$<COMPILE_LANGUAGE:CXX>:-Wconversion> $<$<COMPILE_LANGUAGE:CXX>:-Wno-sign-conversion>)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # GCC 12 sees overlaps in std::string's operator+ that are not there (GCC bug 105651).
    target_compile_options(${name} PRIVATE -Wno-restrict)
  endif()
  if(ROPETEAM_SANITIZE AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Under the sanitizers GCC 12 takes members of inactive std::variant alternatives for uninitialised reads.
    target_compile_options(${name} PRIVATE -Wno-maybe-uninitialized)
  endif()
  if(ROPETEAM_SANITIZE MATCHES "thread")
    # libstdc++'s std::atomic_thread_fence is not modelled by the thread sanitizer; our fences order against DMA only.
    target_compile_options(${name} PRIVATE -Wno-error=tsan)
  endif()
endfunction()

# ropeteam_library(NAME SOURCES...): one static library per component.
function(ropeteam_library name)
  add_library(${name} STATIC ${ARGN})
  ropeteam_target(${name})
endfunction()

# ropeteam_compile_quickly(NAME): for programs that run once or mostly wait. Optimising takes a third of the compile time.
function(ropeteam_compile_quickly name)
  target_compile_options(${name} PRIVATE $<$<CONFIG:Release>:-O1>)
endfunction()

# ropeteam_test(NAME SOURCES... LIBS libs... [TIMEOUT seconds]): a GoogleTest binary whose cases ctest counts one by one.
function(ropeteam_test name)
  cmake_parse_arguments(T "" "TIMEOUT" "LIBS" ${ARGN})
  if(NOT T_TIMEOUT)
    set(T_TIMEOUT 120)
  endif()
  add_executable(${name} ${T_UNPARSED_ARGUMENTS})
  ropeteam_target(${name})
  ropeteam_compile_quickly(${name})
  target_link_libraries(${name} PRIVATE ${T_LIBS} GTest::gmock GTest::gtest_main Threads::Threads)
  if(ROPETEAM_SANITIZE MATCHES "thread")
    # UCX watches madvise() with locks that the thread sanitizer follows, also where glibc gives back the stack of a
    # thread that the sanitizer has forgotten already: a crash at the end of any thread.
    set_target_properties(${name} PROPERTIES CROSSCOMPILING_EMULATOR "env;UCX_MEM_EVENTS=n")
  endif()
  gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT ${T_TIMEOUT})
endfunction()
