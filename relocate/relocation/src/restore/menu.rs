//! An entry in the boot menu, for a restore when this system cannot be used any more: in GRUB's
//! `custom.cfg`, which Debian's `grub.cfg` reads at each boot, or a file of its own for a loader
//! that reads the Boot Loader Specification's entries (systemd-boot).

use super::beside::{Beside, Readers};
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    output::{Render, Text},
    sysroot::Sysroot,
};
use mercury_quiesce::{
    mounts::{line_of, unescaped},
    patient,
};
use serde::Serialize;
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// File that GRUB reads besides its own configuration.
const GRUB: &str = "boot/grub/custom.cfg";
/// File that includes it (by grub-mkconfig's `41_custom`).
const GRUB_MAIN: &str = "boot/grub/grub.cfg";
/// Folders of the Boot Loader Specification's entries, on the partitions that it knows.
const ENTRIES: [&str; 3] = ["boot/loader/entries", "boot/efi/loader/entries", "efi/loader/entries"];

/// The contents of an entry.
#[derive(Clone, Debug)]
pub struct Entry {
    pub title: String,
    pub kernel: PathBuf,
    /// File of the initial RAM disk.
    pub initramfs: PathBuf,
    /// Command line of the kernel.
    pub command_line: String,
}

/// The entry that was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Made {
    /// File that has the entry.
    pub file: PathBuf,
    pub title: String,
    /// Command that selects the entry for the next start only.
    pub once: String,
}

impl Render for Made {
    fn render(&self, to: &mut Text) {
        to.line(format!("boot menu: “{}”, in {}", self.title, self.file.display()));
        to.line(format!("for the next start: {}", self.once));
    }
}

/// A boot loader that was found, with its path of the folder with kernel and initial RAM disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Loader {
    /// GRUB: its file, the file system's identity, the folder in it.
    Grub {
        file: PathBuf,
        /// Name as in `/dev/disk/by-uuid`.
        uuid: String,
        /// Path from the file system's own root.
        folder: String,
    },
    /// systemd-boot and others: their folder of entries, and the folder on that partition.
    Entries {
        /// Folder with a file for each entry.
        entries: PathBuf,
        /// Path from the partition's root.
        folder: String,
    },
}

impl Loader {
    /// Finds the loader of this system, which must be able to read `folder`.
    ///
    /// # Errors
    ///
    /// Returns an error if no loader is known, or it cannot read the folder.
    pub fn find(folder: &Path, sysroot: &Sysroot) -> Result<Self> {
        let is_there = |path: &Path| patient::exists(path).map_err(|error| failed(path, &error));
        is_there(folder)?;
        let folder = folder.canonicalize().map_err(|error| failed(folder, &error))?;
        let refused = |why: String| {
            Err(Error::new(Exit::Failed, why).hint(
                "leave out --boot-menu, and enter the printed lines into the boot menu by hand, or start \
                 the environment over the network",
            ))
        };
        let mut found = None;
        for path in ENTRIES.map(|name| sysroot.path(name)) {
            found = found.or((is_there(&path)? && path.is_dir()).then_some(path));
        }
        if let Some(entries) = found {
            let (at, theirs) = (place(&entries, sysroot)?, place(&folder, sysroot)?);
            if at.number != theirs.number {
                let (entries, folder) = (entries.display(), folder.display());
                return refused(format!(
                    "{folder} is not on the boot loader's partition, where {entries} is"
                ));
            }
            return Ok(Self::Entries { entries, folder: theirs.in_file_system });
        }
        let main = read(&sysroot.path(GRUB_MAIN))?;
        if main.is_empty() {
            return refused(
                "no boot loader is known here: there is neither GRUB's nor systemd-boot's".into(),
            );
        }
        let file = sysroot.path(GRUB);
        if !main.contains("custom.cfg") {
            return refused(format!(
                "{} does not read {}",
                sysroot.path(GRUB_MAIN).display(),
                file.display()
            ));
        }
        let theirs = place(&folder, sysroot)?;
        if theirs.number != place(&sysroot.path("boot/grub"), sysroot)?.number {
            return refused(format!("{} is not on the file system of /boot/grub", folder.display()));
        }
        let device = fs::canonicalize(&theirs.device).unwrap_or_default();
        let names = sysroot.names("dev/disk/by-uuid").into_iter();
        let mut names = names.filter(|name| {
            fs::canonicalize(sysroot.path("dev/disk/by-uuid").join(name)).is_ok_and(|found| found == device)
        });
        let Some(uuid) = names.next() else {
            return refused(format!("{} is on {}, which has no identity", folder.display(), theirs.device));
        };
        Ok(Self::Grub { file, uuid, folder: theirs.in_file_system })
    }

    /// Writes the entry, in place of one with the same title. The loader's file is complete at any
    /// moment.
    ///
    /// # Errors
    ///
    /// Returns an error if it cannot be written; then the older file stays.
    pub fn write(&self, entry: &Entry) -> Result<Made> {
        let (file, text) = match self {
            Self::Grub { file, uuid, folder } => {
                let now = read(file)?;
                (file.clone(), with_block(&now, &entry.title, &grub_entry(entry, uuid, folder)))
            }
            Self::Entries { entries, folder } => {
                (entries.join(format!("{}.conf", file_name(&entry.title))), specified(entry, folder))
            }
        };
        let new = Beside::write(&file, text.as_bytes(), Readers::AsBefore);
        new.and_then(Beside::put).map_err(|error| failed(&file, &error))?;
        Ok(Made { once: self.once(&entry.title), file, title: entry.title.clone() })
    }

    /// Returns the command for a single start. The default entry stays, so that a machine that runs
    /// on after its image was made boots as usual.
    fn once(&self, title: &str) -> String {
        match self {
            Self::Grub { .. } => format!("grub-reboot {}", word(title)),
            Self::Entries { .. } => format!("bootctl set-oneshot {}.conf", file_name(title)),
        }
    }
}

/// Reads a file of the loader; one that is missing is empty.
fn read(file: &Path) -> Result<String> {
    let text = |bytes| String::from_utf8(bytes).map_err(io::Error::other);
    patient::read_whole(file).and_then(text).or_else(|error| match error.kind() {
        io::ErrorKind::NotFound => Ok(String::new()),
        _ => Err(failed(file, &error)),
    })
}

fn failed(path: &Path, error: &io::Error) -> Error {
    Error::new(Exit::Failed, format!("{}: {error}", path.display())).hint("the boot menu is as it was")
}

/// The file system of a path: device number, device name, and the path from the file system's own
/// root.
struct Place {
    number: String,
    device: String,
    in_file_system: String,
}

/// `36 35 98:0 /@root /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`
fn place(path: &Path, sysroot: &Sysroot) -> Result<Place> {
    let table = sysroot.text("proc/self/mountinfo").unwrap_or_default();
    let found = line_of(&table, path).and_then(|line| {
        let (front, back) = line.split_once(" - ")?;
        let mut front = front.split(' ').skip(2).map(unescaped);
        let (number, root, at) = (front.next()?, front.next()?, front.next()?);
        let below = path.strip_prefix(&at).ok()?;
        let in_file_system = Path::new(&root).join(below).to_string_lossy().into_owned();
        Some(Place { number, device: unescaped(back.split(' ').nth(1)?), in_file_system })
    });
    found.ok_or_else(|| {
        Error::new(Exit::Failed, format!("the file system of {} is not known", path.display()))
            .hint("name a folder on the disk that this system boots from")
    })
}

/// Returns the name of a file in the folder, as the loader knows it.
fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Formats an entry as GRUB's script.
fn grub_entry(entry: &Entry, uuid: &str, folder: &str) -> String {
    let file = |path: &Path| word(&format!("{}/{}", folder.trim_end_matches('/'), name_of(path)));
    let words: Vec<String> =
        entry.command_line.split_whitespace().map(|text| word(&limited_later(text))).collect();
    format!(
        "menuentry {} {{\n\tsearch --no-floppy --fs-uuid --set=root {}\n\tlinux {} {}\n\tinitrd {}\n}}\n",
        word(&entry.title),
        word(uuid),
        file(&entry.kernel),
        words.join(" "),
        file(&entry.initramfs),
    )
}

/// Writes the limit of memory so that only the kernel understands it. GRUB would put the initial
/// RAM disk below the limit. With UEFI there is no room there after the kernel ("the initrd is too
/// big"), and GRUB would start the kernel without it.
fn limited_later(text: &str) -> String {
    text.strip_prefix("mem=").map_or_else(|| text.to_owned(), |limit| format!("memmap={limit}"))
}

/// Quotes a word for GRUB's script; in single quotes only the closing quote is special.
fn word(text: &str) -> String {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "/._-=:,+@%".contains(letter);
    if !text.is_empty() && text.chars().all(plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Formats an entry of the Boot Loader Specification.
fn specified(entry: &Entry, folder: &str) -> String {
    let file = |path: &Path| format!("{}/{}", folder.trim_end_matches('/'), name_of(path));
    format!(
        "title {}\nlinux {}\ninitrd {}\noptions {}\n",
        entry.title,
        file(&entry.kernel),
        file(&entry.initramfs),
        entry.command_line
    )
}

fn file_name(title: &str) -> String {
    let letter =
        |letter: char| if letter.is_ascii_alphanumeric() { letter.to_ascii_lowercase() } else { '-' };
    title.chars().map(letter).collect()
}

/// Replaces the block of the same title in a text, or appends the block.
fn with_block(text: &str, title: &str, block: &str) -> String {
    let (begin, end) = (format!("# BEGIN {title}\n"), format!("# END {title}\n"));
    let new = format!("{begin}{block}{end}");
    let old = text.find(&begin).and_then(|from| Some(from..from + text[from..].find(&end)? + end.len()));
    match old {
        Some(range) => [&text[..range.start], &new, &text[range.end..]].concat(),
        None => {
            let newline = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
            format!("{text}{newline}{new}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::symlink;

    fn entry() -> Entry {
        Entry {
            title: "Mercury: restore /dev/vdb".into(),
            kernel: "/boot/mercury/vmlinuz".into(),
            initramfs: "/boot/mercury/initramfs".into(),
            command_line: "mem=128M dyndbg='file x +p' mercury.restore=/dev/vdb".into(),
        }
    }

    /// Makes a system with a boot loader, whose root is one file system.
    fn system(files: &[(&str, &str)]) -> (tempfile::TempDir, Sysroot) {
        let root = tempfile::tempdir().expect("a folder");
        let at = root.path().canonicalize().expect("a path");
        let mounts = format!("1 0 254:1 /@rootfs {} rw - btrfs {}/dev/vda1 rw", at.display(), at.display());
        let always = [("proc/self/mountinfo", &*mounts), ("dev/vda1", ""), ("boot/mercury/vmlinuz", "")];
        for (name, text) in always.iter().chain(files) {
            let path = at.join(name);
            fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
            fs::write(path, text).expect("a file");
        }
        fs::create_dir_all(at.join("dev/disk/by-uuid")).expect("folders");
        symlink("../../vda1", at.join("dev/disk/by-uuid/1234-abcd")).expect("a link");
        let sysroot = Sysroot::at(&at);
        (root, sysroot)
    }

    #[test]
    fn grub_gets_an_entry_and_keeps_what_it_has() {
        let (root, sysroot) = system(&[(GRUB_MAIN, "source custom.cfg"), (GRUB, "set timeout=3")]);
        let loader = Loader::find(&root.path().join("boot/mercury"), &sysroot).expect("GRUB");
        loader.write(&entry()).expect("written");
        let made = loader.write(&entry()).expect("written");
        assert_eq!(made.once, "grub-reboot 'Mercury: restore /dev/vdb'");
        let text = fs::read_to_string(&made.file).expect("a file");
        insta::assert_snapshot!(text, @r"
        set timeout=3
        # BEGIN Mercury: restore /dev/vdb
        menuentry 'Mercury: restore /dev/vdb' {
        	search --no-floppy --fs-uuid --set=root 1234-abcd
        	linux /@rootfs/boot/mercury/vmlinuz memmap=128M 'dyndbg='\''file' x '+p'\''' mercury.restore=/dev/vdb
        	initrd /@rootfs/boot/mercury/initramfs
        }
        # END Mercury: restore /dev/vdb
        ");
    }

    /// A pipe without a writer does not answer, as a disk that is gone.
    #[test]
    fn a_menu_whose_disk_does_not_answer_is_named() {
        let (root, sysroot) = system(&[(GRUB_MAIN, "source custom.cfg")]);
        let loader = Loader::find(&root.path().join("boot/mercury"), &sysroot).expect("GRUB");
        let pipe = root.path().join(GRUB);
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).expect("a pipe");
        let error = loader.write(&entry()).expect_err("no answer");
        assert!(error.message.contains("custom.cfg: it has not answered for "), "{error}");
        // The child that was left behind ends.
        drop(fs::OpenOptions::new().read(true).write(true).open(&pipe).expect("its other end"));
    }

    #[test]
    fn others_get_a_file() {
        let (root, sysroot) = system(&[("boot/loader/entries/debian.conf", "title Debian")]);
        let loader = Loader::find(&root.path().join("boot/mercury"), &sysroot).expect("systemd-boot");
        let made = loader.write(&entry()).expect("written");
        assert!(made.file.ends_with("boot/loader/entries/mercury--restore--dev-vdb.conf"), "{made:?}");
        assert_eq!(made.once, "bootctl set-oneshot mercury--restore--dev-vdb.conf");
        insta::assert_snapshot!(fs::read_to_string(&made.file).expect("a file"), @r"
        title Mercury: restore /dev/vdb
        linux /@rootfs/boot/mercury/vmlinuz
        initrd /@rootfs/boot/mercury/initramfs
        options mem=128M dyndbg='file x +p' mercury.restore=/dev/vdb
        ");
    }

    #[test]
    fn a_folder_that_the_boot_loader_cannot_read_is_refused() {
        let refused = |files: &[(&str, &str)], reason: &str| {
            let (root, sysroot) = system(files);
            let error = Loader::find(&root.path().join("boot/mercury"), &sysroot).expect_err("refused");
            assert!(error.message.contains(reason), "{}", error.message);
        };
        refused(&[], "no boot loader is known");
        refused(&[(GRUB_MAIN, "menuentry x {}")], "does not read");
        let (root, sysroot) = system(&[(GRUB_MAIN, "source custom.cfg")]);
        let elsewhere = tempfile::tempdir_in("/proc/self/cwd").expect("a folder");
        let table = sysroot.text("proc/self/mountinfo").expect("text");
        let other = elsewhere.path().canonicalize().expect("a path");
        let table = format!("{table}\n2 0 254:2 / {} rw - ext4 /dev/vdb1 rw", other.display());
        fs::write(root.path().join("proc/self/mountinfo"), table).expect("a file");
        let error = Loader::find(&other, &sysroot).expect_err("refused");
        assert!(error.message.contains("not on the file system of /boot/grub"), "{}", error.message);
    }

    proptest! {
        /// A POSIX shell reads single quotes as GRUB does.
        #[test]
        fn words_are_read_as_they_are(text in "[ -~äß]{0,24}") {
            let line = format!("printf %s {}", word(&text));
            let output = std::process::Command::new("sh").args(["-c", &line]).output();
            prop_assert_eq!(String::from_utf8(output.expect("sh").stdout).expect("text"), text);
        }

        #[test]
        fn the_rest_of_the_file_stays(
            text in "([a-z# ]{0,12}\n){0,6}",
            old in "[a-z\n]{0,20}",
            new in "[a-z]{1,20}\n",
        ) {
            let with_old = with_block(&text, "T", &format!("{old}\n"));
            prop_assert_eq!(with_block(&with_old, "T", &new), with_block(&text, "T", &new));
            prop_assert!(with_old.starts_with(&text));
        }
    }
}
