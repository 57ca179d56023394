//! A series of images: the last few are kept, with all images that they need.

use super::incremental::Before;
use crate::options::CheckpointOptions;
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use mercury_image::{Identity, Reader};
use mercury_quiesce::patient::Source;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
    time::SystemTime,
};

/// The base of the next image.
#[derive(Debug)]
pub struct Series {
    /// Number of images of which one is full; 1 if all are to be.
    full_every: u16,
    /// Incremental images since the last full one.
    incremental: u16,
    last: Option<PathBuf>,
}

impl Series {
    /// Makes a series with the operator's options.
    #[must_use]
    pub fn new(args: &CheckpointOptions) -> Self {
        let full_every = if args.incremental.is_some() { args.full_every } else { 1 };
        Self { full_every, incremental: 0, last: args.incremental.clone().flatten() }
    }

    /// Returns the base of the next image: the image before, unless it is time for a full one. If
    /// the image before cannot be used the next one is full, unless the operator has just named it.
    ///
    /// # Errors
    ///
    /// Returns an error if the image that the operator named cannot be used.
    pub fn before(&self, is_first: bool) -> Result<Before> {
        let Some(last) = self.last.as_ref().filter(|_| self.incremental + 1 < self.full_every) else {
            return Ok(Before::default());
        };
        match Before::open(last) {
            Err(error) if !is_first => {
                eprintln!("mercury checkpoint: {error}; this image is a full one");
                Ok(Before::default())
            }
            result => result,
        }
    }

    /// Adds an image to the series.
    pub fn add(&mut self, path: PathBuf, is_incremental: bool) {
        self.incremental = if is_incremental { self.incremental + 1 } else { 0 };
        self.last = Some(path);
    }
}

/// Returns the next image's path: the name with the seconds since 1970 appended. The number is
/// larger than any other of the series, because the clock may have been set back. So names sort in
/// the order of the images.
///
/// # Errors
///
/// Returns an error if the folder cannot be read.
pub fn next(path: &Path, now: SystemTime) -> Result<PathBuf> {
    let seconds = now.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let names = names(path).map_err(|error| {
        Error::new(Exit::Failed, format!("{} cannot be read: {error}", folder(path).display()))
            .hint("name a file in a folder that exists")
    })?;
    let last = names.iter().filter_map(|name| number(path, name)).max();
    Ok(numbered(path, last.map_or(seconds, |last| seconds.max(last + 1))))
}

fn numbered(path: &Path, number: u64) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{number:010}"));
    name.into()
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Lists files in the series' folder.
fn names(path: &Path) -> io::Result<Vec<String>> {
    let files = fs::read_dir(folder(path))?.flatten();
    let files = files.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()));
    Ok(files.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
}

/// Returns the number of an image of the series, from its file name.
fn number(path: &Path, file: &str) -> Option<u64> {
    let name = path.file_name()?.to_string_lossy();
    let digits = file.strip_prefix(&*name)?.strip_prefix('.')?;
    let is_ours = digits.len() == 10 && digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse().ok().filter(|_| is_ours)
}

/// Removes all but the last `keep` images of a series, `newest` among them, and the images that
/// these and other images in the folder need. Other files there are not touched.
///
/// # Errors
///
/// Returns an error if the folder cannot be read, or an image not be removed.
pub fn prune(path: &Path, newest: &Path, keep: usize) -> Result<()> {
    remove_old(path, newest, keep).map_err(|error| {
        Error::new(Exit::Failed, format!("old images could not be removed: {error}"))
            .hint("the new one is complete; remove old images by hand")
    })
}

fn remove_old(path: &Path, newest: &Path, keep: usize) -> io::Result<()> {
    let folder = folder(path);
    let (mut images, others): (Vec<_>, Vec<_>) =
        names(path)?.into_iter().partition(|file| number(path, file).is_some());
    images.sort();
    let mut images: Vec<_> = images.iter().map(|image| folder.join(image)).collect();
    // The newest image may have an old name.
    let count = images.len();
    images.retain(|image| image != newest);
    let old = count.saturating_sub(keep).min(images.len());
    let others = others.iter().map(|other| folder.join(other)).filter(|other| lineage(other).is_some());
    images.extend(others.chain([newest.to_owned()].into_iter().filter(|newest| newest.exists())));
    removable(&images, old).into_iter().try_for_each(fs::remove_file)
}

/// Returns those of the first `old` images that no other image needs; none if that is unknown.
fn removable(images: &[PathBuf], old: usize) -> Vec<&PathBuf> {
    let lines: Vec<_> = images.iter().map(|image| lineage(image)).collect();
    let known: BTreeMap<Identity, &Vec<Identity>> =
        lines.iter().flatten().map(|(own, parents)| (*own, parents)).collect();
    let mut needed = BTreeSet::new();
    let mut missing = false;
    for line in &lines[old..] {
        let Some((_, parents)) = line else { return Vec::new() };
        let mut parents = parents;
        // A merged image needs fewer parents than its children know, so its own list counts.
        while let Some(parent) = parents.last() {
            if !needed.insert(*parent) {
                break;
            }
            let Some(found) = known.get(parent) else {
                missing = true;
                needed.extend(parents);
                break;
            };
            parents = found;
        }
    }
    let is_needed = |line: &Option<(Identity, Vec<Identity>)>| match line {
        Some((own, _)) => needed.contains(own),
        // This file may be the missing image.
        None => missing,
    };
    images.iter().zip(&lines).take(old).filter(|(_, line)| !is_needed(line)).map(|(image, _)| image).collect()
}

/// Reads an image's identity, and those of the images that it needs.
fn lineage(path: &Path) -> Option<(Identity, Vec<Identity>)> {
    let reader = Reader::open(Source::open(path).ok()?).ok()?;
    Some((reader.identity(), reader.machine().parents.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::incremental::tests::make;
    use std::time::Duration;

    fn at(folder: &tempfile::TempDir, seconds: u64) -> PathBuf {
        numbered(&folder.path().join("node7"), seconds)
    }

    /// Three images are made, then the clock is set back. The next ones sort after them anyway, and
    /// the oldest are removed.
    #[test]
    fn names_sort_like_the_images_were_made() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("node7");
        let mut made = Vec::new();
        for (identity, seconds) in (1..).zip([1000, 1600, 2200, 400, 1000, 3000]) {
            let now = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
            let image = next(&path, now).expect("a name");
            make(&image, identity, 9, None);
            prune(&path, &image, 3).expect("pruned");
            made.push(image);
        }
        assert_eq!(made, [1000, 1600, 2200, 2201, 2202, 3000].map(|seconds| at(&folder, seconds)));
        assert_eq!(
            made.iter().map(|image| image.exists()).collect::<Vec<_>>(),
            [false, false, false, true, true, true]
        );
        assert!(next(Path::new("/nowhere/x"), SystemTime::UNIX_EPOCH).is_err());
    }

    /// Returns the numbers of the remaining images among 1 to 8.
    fn left(folder: &tempfile::TempDir) -> Vec<u64> {
        (1..=8).filter(|number| at(folder, *number).exists()).collect()
    }

    #[test]
    fn the_last_ones_are_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("node7");
        let images = [1, 500, 1_700_000_000, 1_700_000_600].map(|seconds| at(&folder, seconds));
        images.iter().for_each(|image| make(image, 1, 9, None));
        let others = ["node7", "node7.old", "node7.0000000001.part", "node70.0000000001"];
        others.iter().for_each(|other| fs::write(folder.path().join(other), "").expect("a file"));
        prune(&path, Path::new("newest"), 2).expect("pruned");
        assert_eq!(images.map(|image| image.exists()), [false, false, true, true]);
        assert!(others.iter().all(|other| folder.path().join(other).exists()));
    }

    /// Makes images: 1, 4 and 7 are full; each other one is made on the one before it.
    fn chains() -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        for number in 1..=8_u8 {
            let parent = at(&folder, u64::from(number) - 1);
            let parent = Some(parent.as_path()).filter(|_| number % 3 != 1);
            make(&at(&folder, number.into()), number, number + 10, parent);
        }
        folder
    }

    #[test]
    fn parents_of_kept_images_are_kept() {
        for (keep, expected) in [(8, 1), (6, 1), (5, 4), (3, 4), (2, 7), (1, 7)] {
            let folder = chains();
            prune(&folder.path().join("node7"), Path::new("newest"), keep).expect("pruned");
            assert_eq!(left(&folder), (expected..=8).collect::<Vec<_>>(), "{keep} kept");
        }
    }

    #[test]
    fn images_that_may_be_needed_are_kept() {
        // A kept image cannot be read, so its needs are unknown.
        let folder = chains();
        fs::write(at(&folder, 6), "damaged").expect("a file");
        prune(&folder.path().join("node7"), Path::new("newest"), 3).expect("pruned");
        assert_eq!(left(&folder).len(), 8);
        // A needed image cannot be read: it is that one, or the other.
        let folder = chains();
        fs::write(at(&folder, 2), "damaged").expect("a file");
        fs::write(at(&folder, 4), "damaged").expect("a file");
        prune(&folder.path().join("node7"), Path::new("newest"), 3).expect("pruned");
        assert_eq!(left(&folder), [2, 4, 5, 6, 7, 8]);
        // An image that no other one needs.
        prune(&folder.path().join("node7"), Path::new("newest"), 2).expect("pruned");
        assert_eq!(left(&folder), [7, 8]);
    }

    /// The operator has made one more by hand, and then the clock was set back.
    #[test]
    fn parents_and_the_newest_image_are_kept() {
        let folder = chains();
        let (path, by_hand) = (folder.path().join("node7"), folder.path().join("by-hand"));
        make(&by_hand, 20, 30, Some(&at(&folder, 2)));
        make(&at(&folder, 0), 21, 31, Some(&at(&folder, 5)));
        prune(&path, &at(&folder, 0), 2).expect("pruned");
        assert_eq!(left(&folder), [1, 2, 4, 5, 7, 8]);
        assert!(by_hand.exists() && at(&folder, 0).exists());
    }

    #[test]
    fn each_so_many_is_full() {
        let folder = chains();
        let mut series = Series { full_every: 3, incremental: 0, last: None };
        let mut found = Vec::new();
        for number in 1..=8 {
            let before = series.before(number == 1).expect("something to go on from");
            let is_incremental = !before.lineage().is_empty();
            found.push(is_incremental);
            series.add(at(&folder, number), is_incremental);
        }
        assert_eq!(found, [false, true, true, false, true, true, false, true]);
        // A lost image does not end the series, unless the operator has named it.
        series.last = Some(folder.path().join("lost"));
        assert!(series.before(false).expect("a full one").lineage().is_empty());
        assert!(series.before(true).is_err());
    }
}
