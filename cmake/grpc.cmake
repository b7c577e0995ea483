# gRPC and Protobuf for the folders that include this file: ${ropeteam_grpc} to link, and ropeteam_proto().
# gRPC has a CMake package if it was built by CMake (Debian 12), else pkg-config files. CMake has a module for
# Protobuf.
find_package(Protobuf REQUIRED)
find_program(ROPETEAM_GRPC_CPP_PLUGIN grpc_cpp_plugin REQUIRED)
if(NOT TARGET gRPC::grpc++)
  find_package(gRPC CONFIG QUIET)
endif()
if(TARGET gRPC::grpc++)
  set(ropeteam_grpc gRPC::grpc++)
  set(ropeteam_grpc_version ${gRPC_VERSION})
else()
  find_package(PkgConfig REQUIRED)
  pkg_check_modules(ROPETEAM_GRPC REQUIRED IMPORTED_TARGET grpc++)
  set(ropeteam_grpc PkgConfig::ROPETEAM_GRPC)
  set(ropeteam_grpc_version ${ROPETEAM_GRPC_VERSION})
endif()
# Before 1.37 (Ubuntu 22.04 has 1.30) the callback API has no threads of its own: the code compiles, but its
# calls never make progress.
set(ropeteam_grpc_version_min 1.37)
if(ropeteam_grpc_version AND ropeteam_grpc_version VERSION_LESS ropeteam_grpc_version_min)
  message(FATAL_ERROR "gRPC ${ropeteam_grpc_version} is too old, ${ropeteam_grpc_version_min} is needed: "
                      "build a newer one and name it with CMAKE_PREFIX_PATH")
endif()

# ropeteam_proto(TARGET STEM): adds a library of the messages and services in STEM.proto.
function(ropeteam_proto target stem)
  set(generated ${CMAKE_CURRENT_BINARY_DIR}/generated)
  set(out ${generated}/${stem})
  add_custom_command(
    OUTPUT ${out}.pb.cc ${out}.pb.h ${out}.grpc.pb.cc ${out}.grpc.pb.h
    COMMAND ${CMAKE_COMMAND} -E make_directory ${generated}
    COMMAND protobuf::protoc --proto_path=${PROJECT_SOURCE_DIR} --cpp_out=${generated} --grpc_out=${generated}
            --plugin=protoc-gen-grpc=${ROPETEAM_GRPC_CPP_PLUGIN} ${PROJECT_SOURCE_DIR}/${stem}.proto
    DEPENDS ${PROJECT_SOURCE_DIR}/${stem}.proto
    VERBATIM)
  # Generated code has warnings that we cannot fix, so it is not a ropeteam_target().
  add_library(${target} STATIC ${out}.pb.cc ${out}.grpc.pb.cc)
  target_include_directories(${target} SYSTEM PUBLIC ${generated})
  target_link_libraries(${target} PUBLIC ${ropeteam_grpc} protobuf::libprotobuf)
endfunction()
