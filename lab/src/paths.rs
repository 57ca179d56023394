//! Where things are: the project's sources, and what the lab makes under `target/lab/`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::error::{Context, Result};

/// The project's root directory.
#[must_use]
pub fn root() -> PathBuf {
    let lab = Path::new(env!("CARGO_MANIFEST_DIR"));
    lab.parent().unwrap_or(lab).to_path_buf()
}

/// A directory under `target/lab/`, made if it is not there.
///
/// # Errors
/// If it cannot be made.
pub fn lab_dir(name: &str) -> Result<PathBuf> {
    let dir = root().join("target/lab").join(name);
    fs::create_dir_all(&dir).context(|| format!("make {}", dir.display()))?;
    Ok(dir)
}
