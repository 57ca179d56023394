//! Machines that hung on their first way up, before anything of Mercury's was in them: what there was to see
//! of each, for `lab test` to show at its end.

use std::{fs, fs::File, io::Write, path::PathBuf};

use crate::{
    error::{Context, Error, Result},
    paths,
};

fn book() -> Result<PathBuf> {
    Ok(paths::lab_dir("log")?.join("hung"))
}

/// Adds one.
///
/// # Errors
/// If it cannot be written down.
pub fn record(error: &Error) -> Result<()> {
    let name = std::thread::current().name().unwrap_or("main").to_owned();
    let what = || "record a machine that hung".into();
    let mut book = File::options().create(true).append(true).open(book()?).context(what)?;
    book.write_all(format!("HUNG {name}: {error}\n").as_bytes()).context(what)
}

/// Forgets all.
///
/// # Errors
/// If there is no place for them.
pub fn forget() -> Result<()> {
    let _ = fs::remove_file(book()?);
    Ok(())
}

/// All that have been recorded, and how many they are.
///
/// # Errors
/// If there is no place for them.
pub fn all() -> Result<(usize, String)> {
    let text = fs::read_to_string(book()?).unwrap_or_default();
    Ok((text.lines().filter(|line| line.starts_with("HUNG ")).count(), text))
}
