//! Random numbers, for identities and secrets.

use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};

/// Reads random bytes from the kernel.
///
/// # Errors
///
/// Returns an error if `/dev/urandom` cannot be read.
pub fn random<const COUNT: usize>() -> Result<[u8; COUNT]> {
    use std::io::Read;
    let mut bytes = [0; COUNT];
    let read = std::fs::File::open("/dev/urandom").and_then(|mut from| from.read_exact(&mut bytes));
    read.map(|()| bytes).map_err(|error| {
        Error::new(Exit::Failed, format!("/dev/urandom cannot be read: {error}"))
            .hint("mount devtmpfs on /dev")
    })
}
