//! The record of the restore environments that `restore --prepare` has written.
//!
//! The boot menu starts files of that day. After an upgrade of the kernel, of Mercury or of the microcode they
//! refuse an image of today, when the machine is off. So `checkpoint --poweroff` compares the record with the
//! environment that would be prepared now.
//!
//! The file is JSON: a version, and a record for each folder. The latest is the last.

use super::{
    beside::{Beside, Folders, Readers},
    environment, place,
};
use mercury_abi::code::Code;
use mercury_control::{
    error::{Error, Result},
    sysroot::Sysroot,
};
use mercury_quiesce::patient;
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeSet,
    io,
    path::{Path, PathBuf},
};

/// The file, from the root.
const FILE: &str = "var/lib/mercury/prepared.json";
/// Version of the file. Another one is not read.
const VERSION: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
struct Records {
    version: u32,
    environments: Vec<Record>,
}

/// An environment that was prepared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    folder: PathBuf,
    /// The image that it restores.
    image: PathBuf,
    /// Memory of its kernel.
    memory_mib: u64,
    content: Content,
}

/// Parts of an environment that an image must fit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Content {
    /// The kernel's release and build, as in /proc/version.
    kernel: String,
    /// Mercury's version.
    mercury: String,
    /// BLAKE3 of the early archives with microcode.
    microcode: String,
}

impl Content {
    /// Returns the content of an environment that is made now.
    fn now(sysroot: &Sysroot) -> Self {
        Self {
            kernel: sysroot.text("proc/version").unwrap_or_default(),
            mercury: env!("CARGO_PKG_VERSION").to_owned(),
            microcode: blake3::hash(&environment::early_microcode(sysroot)).to_string(),
        }
    }

    /// Lists the parts that are others now.
    fn differences(&self, now: &Self) -> Vec<String> {
        let mut found = Vec::new();
        if self.kernel != now.kernel {
            found.push(format!("its kernel is “{}”, and “{}” runs", self.kernel, now.kernel));
        }
        if self.mercury != now.mercury {
            found.push(format!("its Mercury is {}, and this is {}", self.mercury, now.mercury));
        }
        if self.microcode != now.microcode {
            found.push("the microcode in the initial RAM disk in /boot is another since".into());
        }
        found
    }
}

/// Adds an environment in `folder` with so much memory, which restores `image`.
///
/// # Errors
///
/// Returns an error if the record cannot be written.
pub(super) fn add(folder: &Path, image: &Path, memory_mib: u64, sysroot: &Sysroot) -> io::Result<()> {
    let (folder, image) = (folder.canonicalize()?, place::whole_path(image)?);
    let mut environments = read(sysroot).unwrap_or_default();
    environments.retain(|one| one.folder != folder);
    environments.push(Record { folder, image, memory_mib, content: Content::now(sysroot) });
    let text = serde_json::to_vec_pretty(&Records { version: VERSION, environments })?;
    let path = sysroot.path(FILE);
    let _folders = Folders::make(path.parent().unwrap_or(Path::new("/")))?;
    Beside::write(&path, &text, Readers::AsBefore)?.put()
}

/// Returns the memory in MiB of the environment that was prepared last for `image`; `None` if none was.
///
/// # Errors
///
/// Returns an error if another environment would be prepared now.
pub fn memory_mib(image: &Path, sysroot: &Sysroot) -> Result<Option<u64>> {
    let Ok(image) = place::whole_path(image) else { return Ok(None) };
    let again = format!(
        "prepare it again: `mercury restore --prepare FOLDER … {}`; or remove {} if you bring the machine \
         back by other means",
        image.display(),
        sysroot.path(FILE).display()
    );
    let refused = |text: String| Err(Error::coded(Code::RestoreUnfit, text).hint(again));
    let environments = match read(sysroot) {
        Ok(environments) => environments,
        Err(error) => {
            return refused(format!("the record of prepared restore environments cannot be read: {error}"));
        }
    };
    let Some(last) = environments.into_iter().rev().find(|one| one.image == image) else { return Ok(None) };
    let found = last.content.differences(&Content::now(sysroot));
    if found.is_empty() {
        return Ok(Some(last.memory_mib));
    }
    refused(format!(
        "the restore environment in {} would refuse the image: {}",
        last.folder.display(),
        found.join("; ")
    ))
}

/// Returns why `checkpoint --poweroff` would be refused for each image that has an environment, or for all
/// images if none was prepared; empty if it would not be for any.
#[must_use]
pub fn refusals(sysroot: &Sysroot) -> Vec<Error> {
    let images: BTreeSet<_> = match read(sysroot) {
        Ok(environments) if environments.is_empty() => {
            return super::kernel_s_file(sysroot).err().into_iter().collect();
        }
        Ok(environments) => environments.into_iter().map(|one| one.image).collect(),
        // The same for each image.
        Err(_) => [PathBuf::from("IMAGE")].into(),
    };
    images.iter().filter_map(|image| memory_mib(image, sysroot).err()).collect()
}

/// Reads the records. Without a file there are none.
fn read(sysroot: &Sysroot) -> io::Result<Vec<Record>> {
    let bytes = match patient::read_whole(&sysroot.path(FILE)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        read => read?,
    };
    let records: Records = serde_json::from_slice(&bytes)?;
    match records.version {
        VERSION => Ok(records.environments),
        other => Err(io::Error::other(format!("its version is {other}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_initramfs::Archive;
    use std::fs;

    struct Place {
        root: tempfile::TempDir,
        sysroot: Sysroot,
    }

    impl Place {
        fn new() -> Self {
            let root = tempfile::tempdir().expect("a folder");
            let sysroot = Sysroot::at(root.path());
            let place = Self { root, sysroot };
            place.put("proc/version", b"Linux version 6.1.0-37 #1");
            place.put("proc/sys/kernel/osrelease", b"6.1.0-37");
            place.put("image", b"");
            place.put("other", b"");
            place
        }

        fn put(&self, name: &str, bytes: &[u8]) {
            let path = self.root.path().join(name);
            fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
            fs::write(path, bytes).expect("a file");
        }

        fn add(&self, folder: &str, image: &str, mib: u64) {
            let folder = self.root.path().join(folder);
            fs::create_dir_all(&folder).expect("a folder");
            add(&folder, &self.root.path().join(image), mib, &self.sysroot).expect("added");
        }

        fn memory(&self, image: &str) -> Result<Option<u64>> {
            memory_mib(&self.root.path().join(image), &self.sysroot)
        }
    }

    fn early(data: &[u8]) -> Vec<u8> {
        let mut archive = Archive::default();
        archive.file("kernel/x86/microcode/GenuineIntel.bin", data);
        archive.finish()
    }

    #[test]
    fn each_image_has_its_environment() {
        let place = Place::new();
        assert_eq!(place.memory("image"), Ok(None));
        place.add("boot/a", "image", 128);
        place.add("boot/b", "other", 256);
        assert_eq!((place.memory("image"), place.memory("other")), (Ok(Some(128)), Ok(Some(256))));
        assert_eq!(place.memory("a-third"), Ok(None));
        place.add("boot/c", "image", 96);
        assert_eq!(place.memory("image"), Ok(Some(96)), "the latest");
        place.add("boot/a", "image", 64);
        assert_eq!(place.memory("image"), Ok(Some(64)), "the latest");
        let all = read(&place.sysroot).expect("read");
        assert_eq!(all.len(), 3, "{all:?}");
    }

    /// The machine would be off when the old environment refuses its image.
    #[test]
    fn an_environment_of_before_an_upgrade_is_refused() {
        let changes: [(&str, Vec<u8>, &str); 2] = [
            ("proc/version", b"Linux version 6.1.0-38 #1".to_vec(), "its kernel is"),
            ("boot/initrd.img-6.1.0-37", early(b"new"), "the microcode"),
        ];
        for (file, bytes, expected) in changes {
            let place = Place::new();
            place.put("boot/initrd.img-6.1.0-37", &early(b"old"));
            place.add("boot/a", "image", 128);
            place.put(file, &bytes);
            let error = place.memory("image").expect_err("another");
            assert_eq!(error.code, Some(Code::RestoreUnfit));
            assert!(error.message.contains(expected), "{error}");
            assert!(error.hint.is_some_and(|hint| hint.starts_with("prepare it again")), "no hint");
            assert_eq!(place.memory("other"), Ok(None));
            place.add("boot/c", "other", 128);
            let refused = refusals(&place.sysroot);
            assert!(matches!(refused.as_slice(), [one] if one.message == error.message), "{refused:?}");
            place.add("boot/a", "image", 128);
            assert_eq!(place.memory("image"), Ok(Some(128)));
            assert!(refusals(&place.sysroot).is_empty());
        }
        let place = Place::new();
        place.add("boot/a", "image", 128);
        let text = fs::read_to_string(place.sysroot.path(FILE)).expect("a file");
        let version = format!("\"mercury\": \"{}\"", env!("CARGO_PKG_VERSION"));
        assert!(text.contains(&version), "{text}");
        place.put(FILE, text.replace(&version, "\"mercury\": \"0.0.1\"").as_bytes());
        assert!(place.memory("image").is_err_and(|error| error.message.contains("its Mercury is 0.0.1")));
    }

    #[test]
    fn a_record_that_cannot_be_read_is_refused_until_it_is_renewed() {
        let place = Place::new();
        for text in ["", "{", r#"{"version":2,"environments":[]}"#] {
            place.put(FILE, text.as_bytes());
            assert!(place.memory("image").is_err(), "{text}");
            assert_eq!(refusals(&place.sysroot).len(), 1, "{text}");
        }
        place.add("boot/a", "image", 128);
        assert_eq!(place.memory("image"), Ok(Some(128)));
    }
}
