//! Names of products, computed from the contents of their ingredients.

use std::{fs, path::Path};

use sha2::{Digest, Sha256};

use crate::error::{Context, Result};

/// The ingredients that decide how a product comes out.
#[derive(Debug, Default)]
pub struct Ingredients(Sha256);

impl Ingredients {
    /// Adds a text or other bytes. The length is hashed too, so that two parts cannot run together.
    #[must_use]
    pub fn with(mut self, part: impl AsRef<[u8]>) -> Self {
        let part = part.as_ref();
        self.0.update(part.len().to_le_bytes());
        self.0.update(part);
        self
    }

    /// Adds a file's contents, or those of a whole directory with the names in it.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn with_path(self, path: &Path) -> Result<Self> {
        let what = || format!("read {}", path.display());
        if path.is_symlink() {
            let to = fs::read_link(path).context(what)?;
            return Ok(self.with(to.as_os_str().as_encoded_bytes()));
        }
        if !path.is_dir() {
            return Ok(self.with(fs::read(path).context(what)?));
        }
        let mut entries: Vec<_> = fs::read_dir(path).context(what)?.flatten().collect();
        entries.sort_by_key(fs::DirEntry::file_name);
        entries.iter().try_fold(self, |all, entry| {
            all.with(entry.file_name().as_encoded_bytes()).with_path(&entry.path())
        })
    }

    /// Returns the name: twelve hexadecimal digits.
    #[must_use]
    pub fn name(self) -> String {
        self.0.finalize().iter().take(6).map(|byte| format!("{byte:02x}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_do_not_run_together() {
        let name =
            |parts: &[&str]| parts.iter().fold(Ingredients::default(), |all, part| all.with(part)).name();
        assert_ne!(name(&["ab", "c"]), name(&["a", "bc"]));
        assert_eq!(name(&["ab", "c"]), name(&["ab", "c"]));
    }
}
