//! The demonstration: attach and detach beneath a machine that is hard at work.

use crate::error::{Error, Result};

/// Not built yet.
///
/// # Errors
/// Always, for now.
pub fn run() -> Result<()> {
    Err(Error::NotBuilt("demo"))
}
