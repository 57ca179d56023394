//! A bell for a thread that waits for a descriptor: an event counter of the host.

use std::{
    fs::File,
    io::{Read, Write},
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
};

use crate::error::{Error, Result};

/// It rings until it is silenced.
#[derive(Debug)]
pub struct Bell(File);

impl Bell {
    /// A silent one.
    ///
    /// # Errors
    /// If the host has none.
    pub fn new() -> Result<Self> {
        // SAFETY: It takes numbers.
        let descriptor = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if descriptor < 0 {
            return Err(Error::system("make an event counter"));
        }
        // SAFETY: The descriptor was made above and has no other owner.
        Ok(Self(File::from(unsafe { OwnedFd::from_raw_fd(descriptor) })))
    }

    pub fn ring(&self) {
        // It fails only if it rings as loud as it can.
        let _ = (&self.0).write(&1_u64.to_ne_bytes());
    }

    /// Waits until it rings, and silences it.
    pub fn wait(&self) {
        let mut polled = libc::pollfd { fd: self.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: There is one, and no time limit.
        unsafe { libc::ppoll(&raw mut polled, 1, std::ptr::null(), std::ptr::null()) };
        self.silence();
    }

    pub fn silence(&self) {
        // It fails only if it is silent.
        let _ = (&self.0).read(&mut [0; 8]);
    }
}

impl AsRawFd for Bell {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
