//! Attach and detach for hours under everything that machines do.

use crate::error::{Error, Result};

/// Not built yet.
///
/// # Errors
/// Always, for now.
pub fn run() -> Result<()> {
    Err(Error::NotBuilt("soak"))
}
