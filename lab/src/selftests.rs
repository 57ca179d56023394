//! Linux's own tests of KVM, from the source of Debian 12's kernel. They are built in that
//! release's build root and put on a disk.

use std::{fs, path::PathBuf};

use crate::{
    error::{Context, Result},
    hash::Ingredients,
    host,
    image::{self, Release},
    lock::Lock,
    previrtualization::root,
};

/// The disk's label.
const LABEL: &str = "mercury-tests";
const SIZE: &str = "200M";

/// The script that builds the tests, in a copy of the source of its own: a kernel is not built
/// beside a source in which something was made. Not all tests build with every source's headers; a
/// run shows which do. Performance tests are left out.
const BUILD: &str = r#"set -e
cd /build
rm -rf selftests
mkdir -p selftests/arch
cd "$1"
cp -r tools include scripts usr Makefile Kbuild Kconfig ../selftests
cp -r arch/x86 ../selftests/arch
cd ../selftests
make -s headers
cd tools/testing/selftests/kvm
make -s -k -j2 LDFLAGS='-pthread -no-pie -static' || true
mkdir out
for test in x86_64/* set_memory_region_test kvm_binary_stats_test; do
	case $test in *.*) continue ;; esac
	! [ -x "$test" ] || strip -o "out/${test##*/}" "$test"
done
rm -rf /build/selftests.out
mv out /build/selftests.out
rm -rf /build/selftests"#;

/// Returns QEMU's arguments for the disk.
///
/// # Errors
/// If the disk cannot be made.
pub fn arguments() -> Result<[String; 4]> {
    let disk = ensure()?.to_string_lossy().replace(',', ",,");
    let drive = format!("if=none,id=tests,file={disk},format=raw,read-only=on");
    Ok(["-drive".into(), drive, "-device".into(), "virtio-blk-pci,drive=tests".into()])
}

fn ensure() -> Result<PathBuf> {
    let release = Release::Bookworm;
    let tree = root::ensure(release)?;
    let disk = tree.with_file_name(format!("selftests-{}.img", Ingredients::default().with(BUILD).name()));
    if !disk.exists() {
        let _lock = Lock::wait("selftests")?;
        let mut command = host::as_root("chroot");
        command.arg(&tree).args(["/bin/sh", "-c", BUILD, "build", root::source(release)]);
        host::run("Linux's tests of KVM", "selftests", &mut command)?;
        let unfinished = disk.with_extension("new");
        image::make_disk("a disk with them", &tree.join("build/selftests.out"), &unfinished, LABEL, SIZE)?;
        fs::rename(&unfinished, &disk).context(|| "name the disk".into())?;
    }
    Ok(disk)
}
