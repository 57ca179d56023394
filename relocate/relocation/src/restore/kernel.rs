//! The file of the running kernel. Its name alone proves little: a package may have replaced it by
//! another build of the same release since the boot. The difference would show only in the restore
//! environment, when the running system is gone.

use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    sysroot::Sysroot,
};
use mercury_quiesce::patient;
use std::{
    io,
    ops::Range,
    path::{Path, PathBuf},
};

/// The fields of a bzImage's header (Documentation/arch/x86/boot.rst): its magic number, and the
/// offset of its version, counted from the second sector.
const MAGIC: (Range<usize>, &[u8]) = (0x202..0x206, b"HdrS");
const VERSION_AT: usize = 0x20E;
const SECTOR: usize = 0x200;
/// Bytes that hold the version in all known kernels, and some more.
const BEGINNING: usize = 128 << 10;

/// Returns the running kernel's release.
#[must_use]
pub fn release(sysroot: &Sysroot) -> String {
    sysroot.text("proc/sys/kernel/osrelease").unwrap_or_default()
}

/// Returns the running kernel's file.
///
/// # Errors
///
/// Returns an error if the file is missing, cannot be read, or holds another kernel.
pub fn image(sysroot: &Sysroot) -> Result<PathBuf> {
    let release = release(sysroot);
    let names = [format!("boot/vmlinuz-{release}"), format!("usr/lib/modules/{release}/vmlinuz")];
    let paths = names.iter().map(|name| sysroot.path(name));
    let mut there = paths
        .map(|path| (version_of(&path), path))
        .filter(|(version, _)| !version.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound));
    let running = sysroot.text("proc/version").unwrap_or_default();
    let is_it = |version: &io::Result<Option<String>>| {
        version.as_ref().is_ok_and(|version| version.as_ref().is_some_and(|it| is_running(it, &running)))
    };
    let Some((version, path)) = there.next() else {
        return Err(Error::new(Exit::Impossible, format!("the kernel {release} is not in /boot"))
            .hint("mount /boot, or install the package of the running kernel"));
    };
    if is_it(&version) {
        return Ok(path);
    }
    if let Some((_, other)) = there.find(|(version, _)| is_it(version)) {
        return Ok(other);
    }
    let theirs = version.map_err(|error| {
        Error::new(Exit::Failed, format!("the kernel's file {} cannot be read: {error}", path.display()))
            .hint("make its disk answer again, or install the package of the running kernel again")
    })?;
    let theirs = theirs.unwrap_or_else(|| "no Linux kernel".into());
    let text = format!("{} is “{theirs}”, and the kernel that runs “{running}”", path.display());
    Err(Error::new(Exit::Impossible, text)
        .hint("boot the kernel that is on the disk, or put the file of the running one back"))
}

fn version_of(path: &Path) -> io::Result<Option<String>> {
    patient::read_within(path, BEGINNING).map(|bytes| version_in(&bytes))
}

/// Returns the version in a bzImage with this beginning: `6.1.0-37-amd64 (builder@host) #1 SMP …
/// Debian 6.1.140-1 (2025-05-22)`.
fn version_in(image: &[u8]) -> Option<String> {
    let at = image.get(VERSION_AT..VERSION_AT + 2)?;
    let at = usize::from(u16::from_le_bytes([at[0], at[1]]));
    if image.get(MAGIC.0)? != MAGIC.1 || at == 0 {
        return None;
    }
    let text = image.get(SECTOR + at..)?;
    let end = text.iter().position(|byte| *byte == 0)?;
    Some(String::from_utf8(text[..end].to_vec()).ok()?.trim_end().to_owned())
}

/// Returns true if a kernel of this version is the running one, whose /proc/version says: `Linux
/// version RELEASE (builder@host) (compilers) BUILD`.
fn is_running(version: &str, running: &str) -> bool {
    let release = version.split(' ').next();
    let build = version.find(" #").map(|at| &version[at..]);
    running.split(' ').nth(2) == release && build.is_some_and(|build| running.trim_end().ends_with(build))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const VERSION: &str = "6.1.0-37-amd64 (debian-kernel@lists.debian.org) #1 SMP PREEMPT_DYNAMIC Debian \
        6.1.140-1 (2025-05-22)";
    const RUNNING: &str = "Linux version 6.1.0-37-amd64 (debian-kernel@lists.debian.org) (gcc-12 (Debian \
                           12.2.0-14+deb12u1) 12.2.0, GNU ld (GNU Binutils for Debian) 2.40) #1 SMP \
                           PREEMPT_DYNAMIC Debian 6.1.140-1 (2025-05-22)";

    /// Makes a bzImage's beginning.
    fn image_of(version: &str) -> Vec<u8> {
        let mut image = vec![0; SECTOR + 0x3000];
        image[MAGIC.0].copy_from_slice(MAGIC.1);
        image[VERSION_AT..VERSION_AT + 2].copy_from_slice(&0x2FC0_u16.to_le_bytes());
        image.truncate(SECTOR + 0x2FC0);
        image.extend(version.as_bytes());
        image.extend(b"\0other text\0");
        image
    }

    #[test]
    fn a_kernel_says_what_it_is() {
        let whole = image_of(VERSION);
        assert_eq!(version_in(&whole).as_deref(), Some(VERSION));
        assert_eq!(version_in(&whole[..SECTOR + 0x2FC0 + 10]), None, "it does not end");
        assert_eq!(version_in(&whole[..100]), None);
        let mut other = whole.clone();
        other[0x202] = b'X';
        assert_eq!(version_in(&other), None);
        other = whole;
        other[VERSION_AT..VERSION_AT + 2].fill(0);
        assert_eq!(version_in(&other), None);
    }

    #[test]
    fn another_build_is_another_kernel() {
        assert!(is_running(VERSION, RUNNING));
        assert!(!is_running(&VERSION.replace("6.1.140-1 (2025-05-22)", "6.1.147-1 (2025-08-02)"), RUNNING));
        assert!(!is_running(&VERSION.replace("#1", "#2"), RUNNING));
        assert!(!is_running(&VERSION.replace("-37-", "-38-"), RUNNING));
        assert!(!is_running("6.1.0-37-amd64", RUNNING));
        assert!(!is_running(VERSION, ""));
        assert!(!is_running("", ""));
    }

    /// A pipe without a writer does not answer, as a disk that is gone.
    #[test]
    fn a_kernel_whose_disk_does_not_answer_is_named() {
        let root = tempfile::tempdir().expect("a folder");
        fs::create_dir_all(root.path().join("proc/sys/kernel")).expect("folders");
        fs::write(root.path().join("proc/sys/kernel/osrelease"), "6.1.0\n").expect("a file");
        fs::create_dir(root.path().join("boot")).expect("a folder");
        let pipe = root.path().join("boot/vmlinuz-6.1.0");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).expect("a pipe");
        let error = image(&Sysroot::at(root.path())).expect_err("no answer");
        assert!(error.message.contains("/boot/vmlinuz-6.1.0 cannot be read: it has not answered"), "{error}");
        // The child that was left behind ends.
        drop(fs::OpenOptions::new().read(true).write(true).open(&pipe).expect("its other end"));
    }

    #[test]
    fn only_the_running_kernel_s_file_is_taken() {
        let root = tempfile::tempdir().expect("a folder");
        let put = |name: &str, bytes: &[u8]| {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
            fs::write(path, bytes).expect("a file");
        };
        let sysroot = Sysroot::at(root.path());
        put("proc/sys/kernel/osrelease", b"6.1.0-37-amd64\n");
        put("proc/version", format!("{RUNNING}\n").as_bytes());
        assert!(image(&sysroot).expect_err("none").message.contains("not in /boot"));
        let newer = VERSION.replace("6.1.140-1", "6.1.147-1");
        put("boot/vmlinuz-6.1.0-37-amd64", &image_of(&newer));
        let error = image(&sysroot).expect_err("another");
        assert!(error.message.contains(&newer) && error.hint.is_some_and(|hint| hint.contains("boot")));
        put("usr/lib/modules/6.1.0-37-amd64/vmlinuz", &image_of(VERSION));
        assert!(image(&sysroot).expect("it").ends_with("modules/6.1.0-37-amd64/vmlinuz"));
        put("boot/vmlinuz-6.1.0-37-amd64", &image_of(VERSION));
        assert!(image(&sysroot).expect("it").ends_with("boot/vmlinuz-6.1.0-37-amd64"));
    }
}
