//! The paths of the project's sources, and of the lab's products under `target/lab/`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::error::{Context, Result};

/// Returns the project's root directory.
#[must_use]
pub fn root() -> PathBuf {
    let lab = Path::new(env!("CARGO_MANIFEST_DIR"));
    lab.parent().unwrap_or(lab).to_path_buf()
}

/// Returns a directory under `target/lab/`, and makes it if it is missing.
///
/// # Errors
/// If the directory cannot be made.
pub fn lab_dir(name: &str) -> Result<PathBuf> {
    let dir = root().join("target/lab").join(name);
    fs::create_dir_all(&dir).context(|| format!("make {}", dir.display()))?;
    Ok(dir)
}
