//! Linux's own tests, from the source of Debian 12's kernel: those of KVM, and those of system calls
//! and of the processor as programs see it. They are built in that release's build root and put on a
//! disk.

use std::{fs, path::PathBuf};

use crate::{
    apt::Packages,
    error::{Context, Result},
    hash::Ingredients,
    host,
    image::{self, Release},
    lock::Lock,
    previrtualization::root,
};

/// The disks' label.
const LABEL: &str = "mercury-tests";

/// The script that copies the source for the tests: a kernel is not built beside a source in which
/// something was made.
const COPY: &str = r#"set -e
cd /build
rm -rf selftests selftests.out
mkdir -p selftests/arch selftests/mm
cd "$1"
cp -r tools include scripts usr Makefile Kbuild Kconfig ../selftests
cp -r arch/x86 ../selftests/arch
cp mm/*.h ../selftests/mm
cd ../selftests
make -s headers
cd tools/testing/selftests
"#;

/// The script that builds the tests of KVM. Not all of them build with every source's headers; a run
/// shows which do. Performance tests are left out.
const BUILD_KVM: &str = r#"cd kvm
make -s -k -j2 LDFLAGS='-pthread -no-pie -static' || true
mkdir out
for test in x86_64/* set_memory_region_test kvm_binary_stats_test; do
	case $test in *.*) continue ;; esac
	! [ -x "$test" ] || strip -o "out/${test##*/}" "$test"
done
mv out /build/selftests.out
rm -rf /build/selftests"#;

/// The script that builds the tests in [`LIST`], the second argument. Their directories have files
/// that they need.
const BUILD_PROGRAMS: &str = r#"extra=/build/selftests.packages/usr
export C_INCLUDE_PATH=$extra/include LIBRARY_PATH=$extra/lib/x86_64-linux-gnu
rm -f $LIBRARY_PATH/*.so*
# Programs with a checker of addresses do not start in a hosted machine.
sed -i 's/-fsanitize=[a-z]*//g' */Makefile
mkdir /build/selftests.out
printf '%s' "$2" >/build/selftests.out/list
tests=$(printf '%s' "$2" | grep -v '^#')
for directory in $(printf '%s\n' "$tests" | cut -d: -f1 | sort -u); do
	make -k -C "$directory" || true
	mkdir -p "/build/selftests.out/$directory"
	cp -r "$directory/." "/build/selftests.out/$directory"
done
cd /build/selftests.out
find . -name '*.[cSoh]' -delete
for test in $tests; do
	[ -x "${test%%:*}/${test#*:}" ] || { echo "$test was not built"; exit 1; }
done
rm -rf /build/selftests /build/selftests.packages"#;

/// The tests that are run in any machine.
const LIST: &str = include_str!("../guest/hosted/verdicts.list");
/// The packages that tests of privileges and of message queues need.
const PACKAGES: Packages =
    Packages { release: "bookworm", backports: false, names: "libcap-dev,libpopt-dev" };

/// A set of tests, on a disk of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    Kvm,
    Programs,
}

impl Set {
    fn script(self) -> String {
        COPY.to_owned() + if self == Self::Kvm { BUILD_KVM } else { BUILD_PROGRAMS }
    }

    fn recipe(self) -> Ingredients {
        let all = Ingredients::default().with(self.script());
        if self == Self::Kvm { all } else { all.with(LIST).with(format!("{PACKAGES:?}")) }
    }

    fn ensure(self) -> Result<PathBuf> {
        let release = Release::Bookworm;
        let tree = root::ensure(release)?;
        let disk = tree.with_file_name(format!("selftests-{}.img", self.recipe().name()));
        let _lock = Lock::wait("selftests")?;
        if disk.exists() {
            return Ok(disk);
        }
        if self == Self::Programs {
            let packages = tree.join("build/selftests.packages");
            host::remove_tree(&packages)?;
            PACKAGES.extract("a library for Linux's tests", "selftests-packages", &packages)?;
        }
        let mut command = host::as_root("chroot");
        command.arg(&tree).args(["/bin/sh", "-c", &self.script(), "build", root::source(release), LIST]);
        host::run("Linux's own tests", "selftests", &mut command)?;
        let unfinished = disk.with_extension("new");
        image::make_disk("a disk with them", &tree.join("build/selftests.out"), &unfinished, LABEL, "200M")?;
        fs::rename(&unfinished, &disk).context(|| "name the disk".into())?;
        Ok(disk)
    }

    fn arguments(self) -> Result<[String; 4]> {
        let disk = self.ensure()?.to_string_lossy().replace(',', ",,");
        let drive = format!("if=none,id=tests,file={disk},format=raw,read-only=on");
        Ok(["-drive".into(), drive, "-device".into(), "virtio-blk-pci,drive=tests".into()])
    }
}

/// Returns QEMU's arguments for the disk with the tests of KVM.
///
/// # Errors
/// If the disk cannot be made.
pub fn arguments() -> Result<[String; 4]> {
    Set::Kvm.arguments()
}

/// Returns the disk with the tests that run in any machine.
///
/// # Errors
/// If the disk cannot be made.
pub fn programs() -> Result<PathBuf> {
    Set::Programs.ensure()
}

/// Returns QEMU's arguments for the same disk.
///
/// # Errors
/// If the disk cannot be made.
pub fn programs_arguments() -> Result<[String; 4]> {
    Set::Programs.arguments()
}
