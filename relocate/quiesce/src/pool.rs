//! The size of the pool: memory for copies of pages that are written to during a snapshot.

use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    output::bytes,
    sysroot::Sysroot,
};

/// The size of a page.
const PAGE: u64 = 4096;

/// Largest pool in MiB by default, if it grows while memory is streamed.
pub const GROWING_MOST_MIB: u64 = 1024;
/// Largest pool in MiB by default for a snapshot that is kept, whose pool does not grow.
pub const KEPT_MOST_MIB: u64 = 4096;

/// Memory that is left for programs: a quarter of the available memory, within these bounds in MiB.
const LEFT_MIB: (u64, u64) = (64, 512);

/// Returns the pages of a pool of so many MiB. The default is a quarter of the available memory,
/// but `most_mib` at most.
///
/// # Errors
///
/// Returns an error if programs would have to give up memory for it.
pub fn pages(mib: Option<u64>, most_mib: u64, sysroot: &Sysroot) -> Result<u64> {
    let available = sysroot.available_memory();
    let Some(mib) = mib else { return Ok((available.unwrap_or(0) / 4).min(most_mib << 20) / PAGE) };
    let wanted = mib.saturating_mul(1 << 20);
    let available = available.unwrap_or(u64::MAX);
    let most = available.saturating_sub((available / 4).clamp(LEFT_MIB.0 << 20, LEFT_MIB.1 << 20));
    if wanted <= most {
        return Ok(wanted / PAGE);
    }
    let text = format!(
        "a pool of {} leaves programs too little memory, of which {} are available",
        bytes(wanted),
        bytes(available)
    );
    Err(Error::new(Exit::Impossible, text).hint(format!(
        "use at most what this machine can spare now, {}: --pool {}M",
        bytes(most),
        most >> 20
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const GIB: u64 = 1 << 30;

    fn pool(wanted_mib: Option<u64>, available: u64) -> Result<u64> {
        let root = tempfile::tempdir().expect("a folder");
        fs::create_dir(root.path().join("proc")).expect("a folder");
        let text = format!("MemTotal: 1 kB\nMemAvailable:  {} kB\n", available / 1024);
        fs::write(root.path().join("proc/meminfo"), text).expect("a file");
        pages(wanted_mib, GROWING_MOST_MIB, &Sysroot::at(root.path())).map(|pages| pages * PAGE)
    }

    #[test]
    fn a_quarter_is_taken_up_to_a_point() {
        assert_eq!(pool(None, GIB).expect("a pool"), GIB / 4);
        assert_eq!(pool(None, 64 * GIB).expect("a pool"), GIB);
    }

    /// A pool of 1,032 MiB made the kernel kill programs when 972 MiB were available.
    #[test]
    fn programs_are_left_some_memory() {
        assert_eq!(pool(Some(729), 972 << 20).expect("a pool"), 729 << 20);
        for wanted in [730, 1032, u64::MAX] {
            let error = pool(Some(wanted), 972 << 20).expect_err("too much");
            assert!(error.hint.as_deref().is_some_and(|hint| hint.ends_with("--pool 729M")), "{error:?}");
        }
        assert_eq!(pool(Some(15 << 10), 16 * GIB).expect("a pool"), 15 * GIB);
        assert!(pool(Some(1), 60 << 20).is_err());
    }
}
