//! The first return of a machine from an image of `--poweroff`, told from later ones.
//!
//! The first life says nothing after the instant. So the machine that comes back goes on with its
//! connections and keys. If it came back from the same image again, it would use counters a second time:
//! its disks may be unchanged, because the root is in memory, or mounted read-only. Therefore the machine
//! that has come back notes that in the image, before it says anything.

use crate::values::Name;
use mercury_image::Identity;
use mercury_quiesce::{
    returned,
    stale::{Connections, Stale},
};
use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::{FileTypeExt, OpenOptionsExt},
    path::PathBuf,
};

/// Prepared before the instant.
#[derive(Debug)]
pub(super) struct Once {
    place: Place,
    identity: Identity,
    /// All connections, which end if the machine comes back again.
    pub(super) all: Option<Stale>,
    /// True if no peer may talk to the machine while it stands still.
    pub(super) is_alone: bool,
}

/// The place of the image, as the machine that has come back reaches it.
#[derive(Debug)]
enum Place {
    /// A device, which is open: no path has to be looked up.
    Device(File),
    /// A file on a server, which answers only after the fence is down.
    File(PathBuf),
    /// Another host, which keeps the image for copies.
    Elsewhere,
}

/// The return of a machine from its image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Return {
    First,
    /// A later one, or one that cannot be told from it. The reason is for the operator.
    Again(String),
}

impl Once {
    /// Opens the image's place.
    pub(super) fn prepare(image: &Name, identity: Identity, is_alone: bool) -> io::Result<Self> {
        let place = match image {
            // A file is not there yet.
            Name::Path(path) if std::fs::metadata(path).is_ok_and(|at| at.file_type().is_block_device()) => {
                let mut options = OpenOptions::new();
                Place::Device(options.read(true).write(true).custom_flags(libc::O_DIRECT).open(path)?)
            }
            Name::Path(path) => Place::File(path.clone()),
            Name::Remote { .. } | Name::Stdout => Place::Elsewhere,
        };
        Ok(Self { place, identity, all: Stale::prepare(Connections::All).ok(), is_alone })
    }

    /// Returns true if the image can be reached while the fence is up.
    pub(super) fn is_at_hand(&self) -> bool {
        matches!(self.place, Place::Device(_))
    }

    /// Notes the return in the image. An image that is kept on another host cannot have the note.
    pub(super) fn note(&self) -> Return {
        let noted = match &self.place {
            Place::Device(file) => returned::note(file, Some(self.identity)),
            Place::File(path) => returned::note_at(path, Some(self.identity)),
            Place::Elsewhere => return Return::First,
        };
        match noted {
            Ok(true) => Return::First,
            Ok(false) => Return::Again("this machine has come back from this image before".into()),
            Err(error) => Return::Again(format!(
                "this machine may come back from its image again: its return could not be noted there \
                 ({error})"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_image::{Machine, Writer};

    fn image(path: &std::path::Path, identity: Identity) {
        let file = File::create(path).expect("a file");
        let mut writer = Writer::begin(file, identity, &Machine::default()).expect("begun");
        let zeros = mercury_image::Frame { phys: 0, source: mercury_image::Source::Zero };
        let chunk = mercury_image::Chunk { frames: vec![zeros], data: Vec::new() };
        writer.add(&chunk.compress(1).expect("compressed")).expect("added");
        writer.commit().expect("committed");
        // Images have several records of a page and more.
        let file = OpenOptions::new().write(true).open(path).expect("a file");
        file.set_len(8192).expect("longer");
    }

    #[test]
    fn a_second_return_is_told_from_the_first() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
        let path = folder.path().join("image");
        let identity = Identity([7; 16]);
        image(&path, identity);
        let once = Once::prepare(&Name::Path(path.clone()), identity, true).expect("prepared");
        assert!(!once.is_at_hand(), "a file");
        assert_eq!(once.note(), Return::First);
        let again = Return::Again("this machine has come back from this image before".into());
        assert_eq!(once.note(), again);
        // The device of an image is open.
        let device = File::options().read(true).write(true).open(&path).expect("a file");
        let once = Once { place: Place::Device(device), identity, all: None, is_alone: true };
        assert!(once.is_at_hand());
        assert_eq!(once.note(), again);
        // Another image lies there, so nothing is known of this one.
        image(&path, Identity([8; 16]));
        let Return::Again(why) = once.note() else { panic!("another image") };
        assert!(why.contains("could not be noted there (the image is gone)"), "{why}");
        std::fs::remove_file(&path).expect("gone");
        let once = Once { place: Place::File(path), identity, all: None, is_alone: true };
        assert!(matches!(once.note(), Return::Again(_)));
        let remote = Name::Remote { host: "a".into(), path: "/b".into() };
        assert_eq!(Once::prepare(&remote, identity, false).expect("prepared").note(), Return::First);
    }
}
