//! The Debian packages.

use crate::error::{Error, Result};

/// Not built yet.
///
/// # Errors
/// Always, for now.
pub fn run() -> Result<()> {
    Err(Error::NotBuilt("deb"))
}
