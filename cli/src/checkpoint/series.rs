//! Images one after the other, of which the last few are kept.

use crate::{
    error::{Error, Result},
    exit::Exit,
};
use std::{
    fs, io,
    path::{Path, PathBuf},
    str::FromStr,
    time::{Duration, SystemTime},
};

/// A time between images: `90s`, `10m`, `6h`, `1d`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interval(pub Duration);

impl FromStr for Interval {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let wrong = || "a number with s, m, h or d, such as 10m".to_owned();
        let unit = match text.chars().last() {
            Some('s') => 1,
            Some('m') => 60,
            Some('h') => 3600,
            Some('d') => 86_400,
            _ => return Err(wrong()),
        };
        let number: u64 = text[..text.len() - 1].parse().map_err(|_| wrong())?;
        let seconds = number.checked_mul(unit).filter(|seconds| *seconds > 0).ok_or_else(wrong)?;
        Ok(Self(Duration::from_secs(seconds)))
    }
}

/// The next image's path: seconds since 1970 behind the name, so that names sort like times.
#[must_use]
pub fn next(path: &Path, now: SystemTime) -> PathBuf {
    let seconds = now.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{seconds:010}"));
    name.into()
}

/// Removes all but the last `keep` images of a series. Nothing else in the folder is touched.
///
/// # Errors
/// If the folder cannot be read, or an image not be removed.
pub fn prune(path: &Path, keep: usize) -> Result<()> {
    remove_old(path, keep).map_err(|error| {
        Error::new(Exit::Failed, format!("old images could not be removed: {error}"))
            .hint("the new one is complete; remove old ones by hand")
    })
}

fn remove_old(path: &Path, keep: usize) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let is_ours = |file: &str| {
        let number = file.strip_prefix(&name).and_then(|rest| rest.strip_prefix('.'));
        number.is_some_and(|number| number.len() == 10 && number.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let mut images: Vec<_> = fs::read_dir(folder)?
        .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
        .filter(|file| is_ours(file))
        .collect();
    images.sort();
    let old = images.len().saturating_sub(keep);
    images[..old].iter().try_for_each(|image| fs::remove_file(folder.join(image)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals() {
        assert_eq!("10m".parse(), Ok(Interval(Duration::from_secs(600))));
        assert_eq!("1d".parse(), Ok(Interval(Duration::from_secs(86_400))));
        for wrong in ["", "m", "10", "0s", "-1s", "99999999999999999999d"] {
            assert!(wrong.parse::<Interval>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_last_ones_are_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("node7");
        let at = |seconds| next(&path, SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        for seconds in [1, 500, 1_700_000_000, 1_700_000_600] {
            fs::write(at(seconds), "").expect("a file");
        }
        let others = ["node7", "node7.old", "node7.0000000001.part", "node70.0000000001"];
        others.iter().for_each(|other| fs::write(folder.path().join(other), "").expect("a file"));
        prune(&path, 2).expect("pruned");
        let exists = [1, 500, 1_700_000_000, 1_700_000_600].map(|seconds| at(seconds).exists());
        assert_eq!(exists, [false, false, true, true]);
        assert!(others.iter().all(|other| folder.path().join(other).exists()));
    }
}
