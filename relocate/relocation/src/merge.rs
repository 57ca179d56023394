//! `mercury merge`: merges incremental images and the full image that they were made on.

use crate::{
    checkpoint::{
        incremental::are_one,
        stream::{Pace, Send, Watch, pipe, send_full},
        target::Target,
    },
    images::{image_error, named, unreadable},
    options::MergeOptions,
    values::Name,
};
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    interrupt::Deferred,
    output::{Render, Text, bytes, thousands},
    progress,
    say::Say,
};
use mercury_image::{Chain, Identity, Merged, PAGE, PARENTS_MAX, Packer, Reader, Writer};
use mercury_quiesce::patient::Source;
use serde::Serialize;
use std::{
    fs::{self, File},
    io::BufReader,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

const BUFFER: usize = 1 << 20;
/// Interval at which the line of progress changes.
const INTERVAL: Duration = Duration::from_millis(500);

type Opened = BufReader<Source>;
/// A callback that returns an error to stop the merge.
type Stop<'a> = dyn Fn() -> Result<()> + 'a;

/// The result of a merge.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Identity of the image: the last one's.
    pub identity: String,
    /// Images that were merged.
    pub images: Vec<PathBuf>,
    /// Bytes of memory in the image.
    pub memory: u64,
    /// Bytes of the image.
    pub image: u64,
    /// Pages that are all zeros.
    pub zero_pages: u64,
    /// Pages that equal another one.
    pub duplicate_pages: u64,
    /// Duration in seconds.
    pub seconds: f64,
}

impl Render for Report {
    fn render(&self, to: &mut Text) {
        to.line(format!("image {} is complete, of {}", self.identity, self.images.len()));
        to.line(format!(
            "{} of memory in {}: {} pages of zeros, {} duplicates; {:.1} s",
            bytes(self.memory),
            bytes(self.image),
            thousands(self.zero_pages),
            thousands(self.duplicate_pages),
            self.seconds
        ));
    }
}

/// Merges images.
///
/// # Errors
///
/// Returns an error if one is damaged or missing, or they do not belong together; there is no new
/// image then.
pub fn run(args: &MergeOptions, say: Say<'_>) -> Result<Exit> {
    let deferred = Deferred::begin();
    let report = merge(args, &|| interrupted(&deferred))?;
    if args.out == Name::Stdout {
        // The image went to standard output.
        let mut text = Text::new(false);
        report.render(&mut text);
        eprint!("{}", text.finish());
        return Ok(Exit::Done);
    }
    Ok(say.done(&report))
}

fn merge(args: &MergeOptions, stop: &Stop<'_>) -> Result<Report> {
    let begun = Instant::now();
    let images = complete(&args.images)?;
    refuse_loss(&args.out, &images)?;
    let merged = read(&images, stop)?;
    let mut target = Target::open(&args.out, args.overwrite, &mut |_| Ok(()))?;
    let identity = merged.identity();
    let mut writer = Writer::begin(&mut target, identity, merged.machine()).map_err(image_error)?;
    write(merged, &images, &mut writer, args.level, stop)?;
    let (commit, image) = writer.commit().map_err(image_error)?;
    target.finish().map_err(|error| image_error(error.into()))?;
    Ok(Report {
        identity: identity.to_string(),
        images,
        memory: commit.frames * PAGE as u64,
        image,
        zero_pages: commit.zeros,
        duplicate_pages: commit.duplicates,
        seconds: begun.elapsed().as_secs_f64(),
    })
}

/// Returns the images, with those before them that the first one needs, from its folder.
fn complete(images: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let Some(first) = images.first() else { return Ok(Vec::new()) };
    let open = |path: &Path| Some(Reader::open(File::open(path).ok()?));
    let reader = open(first).transpose().map_err(|error| named(first, error))?;
    let needed = reader.map(|reader| reader.machine().parents.clone()).unwrap_or_default();
    let mut found: Vec<PathBuf> = Vec::new();
    let folder = first.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if needed.len() > PARENTS_MAX {
        return Err(Error::new(Exit::Failed, format!("{} has too many parents", first.display()))
            .hint("no image is made on so many; use another one"));
    }
    let others: Vec<_> = match needed.is_empty() {
        true => Vec::new(),
        false => files(folder)
            .into_iter()
            .filter_map(|path| {
                let reader = open(&path)?.ok()?;
                Some((reader.identity(), reader.machine().parents.is_empty(), path))
            })
            .collect(),
    };
    let mut full = needed.is_empty();
    // From the last to the first: a merged image does not need its parents any more.
    for parent in needed.iter().rev() {
        if full {
            break;
        }
        let candidates = || others.iter().filter(|(identity, ..)| identity == parent);
        let best = candidates().find(|(_, is_full, _)| *is_full).or(candidates().next());
        let Some((_, is_full, path)) = best else { return Err(missing(first, *parent)) };
        full = *is_full;
        found.push(path.clone());
    }
    found.reverse();
    found.extend_from_slice(images);
    Ok(found)
}

fn missing(path: &Path, parent: Identity) -> Error {
    let text = format!("{} needs image {parent}, which is not beside it", path.display());
    Error::new(Exit::Failed, text).hint("name all images, the full one first")
}

/// Lists regular files of a folder, in the order of their names, without unfinished images.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let files = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()));
    let files = files.map(|entry| entry.path());
    let mut files: Vec<_> = files.filter(|path| path.extension().is_none_or(|end| end != "part")).collect();
    files.sort();
    files
}

/// Refuses to overwrite an image that is still needed. A file is replaced at the end, so the last
/// image's own file may be named: the new image replaces it. A device is overwritten from the
/// start.
fn refuse_loss(to: &Name, images: &[PathBuf]) -> Result<()> {
    let (Name::Path(path), Some((last, before))) = (to, images.split_last()) else { return Ok(()) };
    let is_lost = before.iter().any(|image| are_one(image, path)) || !path.is_file() && are_one(last, path);
    if !is_lost {
        return Ok(());
    }
    let text = format!("{} holds one of the images", path.display());
    Err(Error::new(Exit::Failed, text).hint("write the new image to another place"))
}

fn interrupted(deferred: &Deferred) -> Result<()> {
    match deferred.requested() {
        true => Err(Error::new(Exit::Interrupted, "interrupted: there is no new image")),
        false => Ok(()),
    }
}

/// Reads all images to their ends.
fn read(images: &[PathBuf], stop: &Stop<'_>) -> Result<Merged<Opened>> {
    let mut chain = Chain::default();
    let mut shown = Instant::now();
    for (number, path) in images.iter().enumerate() {
        let at = |error| named(path, error);
        let file = Source::open(path).map_err(|error| unreadable(path, &error))?;
        chain.begin(BufReader::with_capacity(BUFFER, file)).map_err(at)?;
        while chain.step().map_err(at)? {
            stop()?;
            if shown.elapsed() >= INTERVAL {
                shown = Instant::now();
                let (number, read) = (number + 1, bytes(chain.offset()));
                progress::line(&format!(
                    "checking {} ({number} of {}): {read}",
                    path.display(),
                    images.len()
                ));
            }
        }
    }
    progress::line("");
    chain.merged().map_err(|error| named(images.last().map_or(Path::new(""), PathBuf::as_path), error))
}

fn write<W: std::io::Write>(
    merged: Merged<Opened>,
    images: &[PathBuf],
    to: &mut Writer<W>,
    level: i32,
    stop: &Stop<'_>,
) -> Result<()> {
    let total = merged.machine().kept_pages();
    let mut shown = Instant::now();
    let mut progress = |frames: u64, image: u64| {
        if shown.elapsed() >= INTERVAL {
            shown = Instant::now();
            let share = frames * 100 / total.max(1);
            progress::line(&format!("{share} % of {}, image {}", bytes(total * PAGE as u64), bytes(image)));
        }
    };
    let mut watch = Watch { progress: &mut progress, stop };
    let result = pipe(|send| put_together(merged, images, send), to, &Pace::steady(level), &mut watch);
    progress::line("");
    result
}

/// Sends all frames of the last image.
fn put_together(mut merged: Merged<Opened>, images: &[PathBuf], send: &mut Send<'_>) -> Result<()> {
    let mut packer = Packer::new(merged.key());
    loop {
        let next = merged.next_frames().map_err(|error| named(&images[merged.image()], error))?;
        let Some(hashes) = next else { break };
        for (phys, hash) in hashes.iter() {
            let added = packer.add_known(phys, hash, |to| merged.find(phys, hash, to));
            added.map_err(|error| named(&images[merged.image()], error))?;
            if !send_full(&mut packer, send) {
                return Ok(());
            }
        }
    }
    packer.finish().into_iter().all(send);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::incremental::tests::make;
    use mercury_image::verify;

    struct Case(tempfile::TempDir);

    impl Case {
        /// Makes a full image, and two on it.
        fn new() -> Self {
            let case = Self(tempfile::tempdir().expect("a folder"));
            make(&case.path("base"), 1, 10, None);
            make(&case.path("one"), 2, 20, Some(&case.path("base")));
            make(&case.path("two"), 3, 30, Some(&case.path("one")));
            case
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn merge(&self, out: &str, images: &[&str]) -> Result<Report> {
            let images = images.iter().map(|name| self.path(name)).collect();
            let out = Name::Path(self.path(out));
            merge(&MergeOptions { out, images, overwrite: false, level: 1 }, &|| Ok(()))
        }

        fn content(&self, name: &str) -> u8 {
            let mut reader = Reader::open(File::open(self.path(name)).expect("a file")).expect("an image");
            assert!(reader.machine().parents.is_empty());
            let chunk = reader.next_chunk().expect("read").expect("a chunk");
            assert_eq!(chunk.data.len(), 3 * PAGE);
            chunk.data[PAGE]
        }
    }

    #[test]
    fn parents_are_found_beside_their_image() {
        let case = Case::new();
        let report = case.merge("out", &["two"]).expect("merged");
        assert_eq!((report.images.len(), case.content("out")), (3, 30));
        assert_eq!(report.identity, Identity([3; 16]).to_string());
        verify(File::open(case.path("out")).expect("a file"), |_| {}).expect("whole");
        assert_eq!(case.merge("out", &["base", "one"]).expect("merged").images.len(), 2);
        assert_eq!(case.content("out"), 20);
        for images in [&["base", "one", "two"][..], &["one", "two"]] {
            assert!(case.merge("base", images).is_err(), "an image that others are made on is not replaced");
        }
        // The new image replaces the last one; then the images before are neither needed nor read.
        case.merge("one", &["one"]).expect("merged");
        fs::remove_file(case.path("base")).expect("removed");
        fs::remove_file(case.path("out")).expect("removed");
        assert_eq!(case.merge("out", &["two"]).expect("merged").images.len(), 2);
        assert_eq!(case.content("out"), 30);
    }

    #[test]
    fn images_that_do_not_belong_together_are_refused() {
        let case = Case::new();
        let refused = |images: &[&str], reason: &str| {
            let error = case.merge("out", images).expect_err("refused").message;
            assert!(error.contains(reason), "{error}");
            assert!(!case.path("out").exists() && !case.path("out.part").exists());
        };
        refused(&["base", "two"], "two: the image is refused: it was made on image 0202");
        refused(&["two", "one"], "one: the image is refused: it was made on image 0101");
        refused(&["nothing"], "nothing cannot be read");
        fs::write(case.path("text"), "text").expect("a file");
        refused(&["base", "text"], "text: the image is refused: this is no image");
        let mut bytes = fs::read(case.path("one")).expect("read");
        let at = bytes.len() - 300;
        bytes[at] ^= 1;
        fs::write(case.path("one"), bytes).expect("a file");
        refused(&["two"], "one: the image is refused: record");
        fs::remove_file(case.path("one")).expect("removed");
        refused(&["two"], "two needs image 0202");
    }
}
