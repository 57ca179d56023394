//! Machines that hung on their first boot, before anything of Mercury's was in them. `lab test`
//! shows the evidence of each at its end.

use std::{fs, fs::File, io::Write, path::PathBuf};

use crate::{
    error::{Context, Error, Result},
    paths,
};

fn book() -> Result<PathBuf> {
    Ok(paths::lab_dir("log")?.join("hung"))
}

/// Records a machine that hung.
///
/// # Errors
/// If the record cannot be written.
pub fn record(error: &Error) -> Result<()> {
    let name = std::thread::current().name().unwrap_or("main").to_owned();
    let what = || "record a machine that hung".into();
    let mut book = File::options().create(true).append(true).open(book()?).context(what)?;
    book.write_all(format!("HUNG {name}: {error}\n").as_bytes()).context(what)
}

/// Removes all records.
///
/// # Errors
/// If the directory of the records cannot be made.
pub fn forget() -> Result<()> {
    let _ = fs::remove_file(book()?);
    Ok(())
}

/// Returns the number and the text of all records.
///
/// # Errors
/// If the directory of the records cannot be made.
pub fn all() -> Result<(usize, String)> {
    let text = fs::read_to_string(book()?).unwrap_or_default();
    Ok((text.lines().filter(|line| line.starts_with("HUNG ")).count(), text))
}
