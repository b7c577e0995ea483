# SPDX-License-Identifier: Apache-2.0
# Sourced by scripts/soft-roce: makes the guest's kernel and initial file system. Expects $ROOT and $RIG.

# Modules of the guest: for its devices, the host's files, and RDMA. Their dependencies are added.
MODULES=(virtio_pci virtio_console 9pnet_virtio 9p overlay crc32_generic crc32c_generic dummy veth sch_netem rdma_rxe
         rdma_ucm ib_umad)

# Prints why the rig cannot work here, or nothing.
missing_tools() {
  local absent=() tool
  if [ "$(uname -m)" != x86_64 ]; then
    echo "the soft-RoCE guest is for x86_64 machines, this is $(uname -m)"
    return
  fi
  while read -r tool package; do
    command -v "$tool" >/dev/null || absent+=("$tool (package $package)")
  done <<'TOOLS'
qemu-system-x86_64 qemu-system-x86
busybox busybox-static
cpio cpio
depmod kmod
setpriv util-linux
xz xz-utils
python3 python3
ip iproute2
rdma iproute2
dpkg-deb dpkg
apt-get apt
TOOLS
  if [ "${#absent[@]}" -gt 0 ]; then
    local text
    text="$(printf ', %s' "${absent[@]}")"
    echo "missing: ${text:2}"
  elif ldd "$(command -v busybox)" >/dev/null 2>&1; then
    echo "$(command -v busybox) needs shared libraries; the package busybox-static has one that does not"
  fi
}

# Prints the folder of kernels and images: in the tree, or in the home folder if the tree is read-only.
image_cache() {
  local folder
  for folder in "$ROOT/build/soft-roce" "${XDG_CACHE_HOME:-$HOME/.cache}/ropeteam/soft-roce"; do
    if mkdir -p "$folder" 2>/dev/null && [ -w "$folder" ]; then
      echo "$folder"
      return
    fi
  done
  echo "soft-roce: neither $ROOT/build nor the home folder's .cache can be written to" >&2
  return 1
}

# Prints the version of Debian's current kernel. If apt knows none (no network), that of a fetched one.
kernel_version() {
  local cache="$1" version
  version="$(apt-cache depends linux-image-amd64 2>/dev/null | sed -n 's/.*Depends: linux-image-//p' | head -n 1)"
  if [ -z "$version" ]; then
    version="$(find "$cache" -maxdepth 1 -name 'kernel-*' ! -name '*.tmp' -printf '%f\n' | sort -V | tail -n 1)"
    version="${version#kernel-}"
  fi
  echo "$version"
}

# fetch_kernel CACHE VERSION: unpacks the kernel's package into CACHE/kernel-VERSION.
fetch_kernel() {
  local cache="$1" version="$2" folder="$1/kernel-$2"
  [ ! -d "$folder" ] || return 0
  rm -rf "$folder.tmp"
  mkdir -p "$folder.tmp"
  if ! (cd "$folder.tmp" && apt-get -q download "linux-image-$version") >"$cache/apt.log" 2>&1; then
    printf 'soft-roce: apt-get download linux-image-%s failed: %s\n' "$version" "$(grep -m 1 '^E:' "$cache/apt.log")" >&2
    return 1
  fi
  dpkg-deb -x "$folder.tmp"/*.deb "$folder.tmp" && rm "$folder.tmp"/*.deb && depmod -b "$folder.tmp" "$version" || return 1
  mv "$folder.tmp" "$folder"
}

# make_initrd KERNEL VERSION INITRD: packs busybox, the modules in their order of loading, and init.
make_initrd() {
  local kernel="$1" version="$2" initrd="$3" tree="$3.tree" module kind file rest name
  rm -rf "$tree"
  mkdir -p "$tree"/{bin,modules,proc,sys,dev,host,writable,root}
  cp "$(command -v busybox)" "$tree/bin/busybox"
  install -m 755 "$RIG/init" "$tree/init"
  for module in "${MODULES[@]}"; do
    # A module that this kernel has built in shows as "builtin".
    modprobe -d "$kernel" -S "$version" --show-depends "$module" >"$tree.list" || return 1
    while read -r kind file rest; do
      [ "$kind" = insmod ] || continue
      name="$(basename "$file" .xz)"
      [ ! -e "$tree/modules/$name" ] || continue
      if [ "${file%.xz}" = "$file" ]; then cp "$file" "$tree/modules/$name"; else xz -dc "$file" >"$tree/modules/$name"; fi
      echo "$name" >>"$tree/modules/order"
    done <"$tree.list"
  done
  (cd "$tree" && find . | cpio -o -H newc --quiet) >"$initrd.tmp" && mv "$initrd.tmp" "$initrd" || return 1
  rm -rf "$tree" "$tree.list"
}

# Prints the folder with vmlinux and initrd. They are made again if their sources have changed. If that fails,
# prints why on standard error.
make_image() {
  local cache version image stamp
  cache="$(image_cache)" || return 1
  # Two runs at the same time would overwrite each other's files.
  exec 9>"$cache/lock"
  flock 9
  version="$(kernel_version "$cache")"
  if [ -z "$version" ] && [ "$(id -u)" = 0 ]; then
    apt-get -q update >"$cache/apt.log" 2>&1 || true
    version="$(kernel_version "$cache")"
  fi
  if [ -z "$version" ]; then
    echo "soft-roce: apt knows no package linux-image-amd64 (apt-get update; on Ubuntu there is none: use Debian 12 or newer)" >&2
    return 1
  fi
  fetch_kernel "$cache" "$version" || return 1
  image="$cache/image-$version"
  stamp="$(cat "$RIG/init" "$RIG/image.sh" "$(command -v busybox)" | sha256sum)"
  if [ "$(cat "$image/stamp" 2>/dev/null)" != "$stamp" ]; then
    mkdir -p "$image"
    python3 "$RIG/extract_vmlinux.py" "$cache/kernel-$version/boot/vmlinuz-$version" "$image/vmlinux" >&2 || return 1
    make_initrd "$cache/kernel-$version" "$version" "$image/initrd" || return 1
    echo "$stamp" >"$image/stamp"
  fi
  exec 9>&-
  echo "$image"
}
