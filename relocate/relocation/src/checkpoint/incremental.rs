//! An image that is made on another one, its parent: it has only the pages that have changed since.
//!
//! Hashes find the changed pages: every image has the hashes of all its frames. So the machine need
//! not be watched between two images (it is native then), and no write can be missed, by a CPU or
//! by a device that bypasses the nested tables. The price is that all memory is read and hashed
//! again. The hashes find zeros and duplicates anyway.

use crate::images::{named, unreadable};
use crate::random::random;
use crate::values::Name;
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    progress,
};
use mercury_image::{Hash, Identity, Key, PARENTS_MAX, Parent, Reader};
use mercury_quiesce::patient::Source;
use std::{
    fs,
    io::BufReader,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

/// Buffer size: frames between hashes are skipped, so reading ahead would be wasted.
const BUFFER: usize = 4 << 10;
const FULL: &str = "without --incremental the image is a full one";

/// The base of an image: a parent, or nothing.
#[derive(Debug, Default)]
pub struct Before {
    parent: Option<(PathBuf, Parent<BufReader<Source>>)>,
}

impl Before {
    /// Opens a parent, and reads it to its end.
    ///
    /// # Errors
    ///
    /// Returns an error if the image cannot be a parent.
    pub fn open(path: &Path) -> Result<Self> {
        let file = Source::open(path).map_err(|error| unreadable(path, &error).hint(FULL))?;
        let file = BufReader::with_capacity(BUFFER, file);
        let parent = progress::during("reading the parent's hashes", || Parent::open(file));
        let parent = parent.map_err(|error| named(path, error).hint(FULL))?;
        if parent.machine().parents.len() >= PARENTS_MAX {
            let text = format!("{} is made on {PARENTS_MAX} others, which is the maximum", path.display());
            return Err(Error::new(Exit::Failed, text)
                .hint("make a full image, or merge that one with those it was made on (`mercury merge`)"));
        }
        Ok(Self { parent: Some((path.to_owned(), parent)) })
    }

    /// Returns the images that the new one needs, its parent last.
    #[must_use]
    pub fn lineage(&self) -> Vec<Identity> {
        self.parent.as_ref().map(|(_, parent)| parent.lineage()).unwrap_or_default()
    }

    /// Returns the key for hashes. Images can be compared only if their keys are equal.
    ///
    /// # Errors
    ///
    /// Returns an error if there are no random bytes.
    pub fn key(&self) -> Result<Key> {
        self.parent.as_ref().map_or_else(|| random().map(Key), |(_, parent)| Ok(parent.key()))
    }

    /// Returns the parent's hash of a frame; see [`Parent::hash_of`].
    ///
    /// # Errors
    ///
    /// Returns an error if the parent can no longer be read.
    pub fn hash_of(&mut self, phys: u64) -> Result<Option<Hash>> {
        let Some((path, parent)) = &mut self.parent else { return Ok(None) };
        parent.hash_of(phys).map_err(|error| named(path, error))
    }

    /// Refuses to write the new image over one that it needs.
    ///
    /// # Errors
    ///
    /// Returns an error in that case.
    pub fn refuse_loss(&self, to: &Name) -> Result<()> {
        let (Some((parent, _)), Name::Path(path)) = (&self.parent, to) else { return Ok(()) };
        let held = Source::open(path).ok().and_then(|file| Reader::open(file).ok());
        let is_needed = held.is_some_and(|held| self.lineage().contains(&held.identity()));
        if !is_needed && !are_one(parent, path) {
            return Ok(());
        }
        let text = format!("{} holds an image that the new one would need", path.display());
        Err(Error::new(Exit::Failed, text).hint("write it to another place"))
    }
}

/// Returns true if two names lead to the same file or the same device.
#[must_use]
pub fn are_one(one: &Path, other: &Path) -> bool {
    let identity = |path: &Path| {
        let found = fs::metadata(path).ok()?;
        let is_device = found.file_type().is_block_device();
        Some(if is_device { (true, found.rdev(), 0) } else { (false, found.dev(), found.ino()) })
    };
    identity(one).is_some_and(|found| identity(other) == Some(found))
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use mercury_image::{Kind, Machine, PAGE, Packer, Range, Writer};

    /// Makes a small image of a few pages, on another one.
    pub fn make(path: &Path, identity: u8, content: u8, parent: Option<&Path>) {
        let mut before = parent.map_or_else(Before::default, |path| Before::open(path).expect("a parent"));
        let ranges = vec![Range { start_phys: 0x1000, pages: 4, kind: Kind::Kept }];
        let machine = Machine { parents: before.lineage(), ranges, ..Machine::default() };
        let mut packer = Packer::new(before.key().expect("a key"));
        for number in 0..4_u8 {
            let phys = 0x1000 * (u64::from(number) + 1);
            let page = [if number == 2 { content } else { number }; PAGE];
            packer.add(phys, &page, before.hash_of(phys).expect("a hash"));
        }
        let file = fs::File::create(path).expect("a file");
        let mut writer = Writer::begin(file, Identity([identity; 16]), &machine).expect("begun");
        for part in packer.finish() {
            writer.add(&part.compress(1).expect("compressed")).expect("added");
        }
        let (commit, _) = writer.commit().expect("committed");
        assert_eq!(commit.unchanged, if parent.is_some() { 3 } else { 0 });
    }

    #[test]
    fn a_parent_is_not_written_over() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name| folder.path().join(name);
        make(&path("base"), 1, 10, None);
        make(&path("next"), 2, 20, Some(&path("base")));
        fs::copy(path("base"), path("copy")).expect("copied");
        make(&path("other"), 9, 10, None);
        std::os::unix::fs::symlink(path("next"), path("link")).expect("a link");
        let before = Before::open(&path("next")).expect("a parent");
        for (to, allowed) in [
            ("base", false),
            ("next", false),
            ("copy", false),
            ("link", false),
            ("other", true),
            ("new", true),
        ] {
            let refused = before.refuse_loss(&Name::Path(path(to)));
            assert_eq!(refused.is_ok(), allowed, "{to}");
        }
        assert!(Before::default().refuse_loss(&Name::Path(path("base"))).is_ok());
    }

    #[test]
    fn an_unusable_parent_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("x");
        let error = Before::open(&path).map(drop).expect_err("refused");
        assert!(error.message.contains("x cannot be read"), "{error}");
        fs::write(&path, "something else").expect("a file");
        let error = Before::open(&path).map(drop).expect_err("refused");
        assert!(error.message.contains("no image of a machine"), "{error}");
        assert_eq!(error.hint.as_deref(), Some(FULL));
    }
}
