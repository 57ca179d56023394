//! Lists that the kernel gives by netlink, as netlink(7) describes it.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::fd::FromRawFd,
};

pub const NLMSG_ERROR: u16 = 2;
pub const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_DUMP: u16 = 0x300;

/// A connection with a part of the kernel.
pub struct Socket(File);

impl Socket {
    /// Connects with the part of this number, in the calling thread's network namespace.
    pub fn open(protocol: i32) -> io::Result<Self> {
        // SAFETY: makes a descriptor, which has no other owner.
        let fd = unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, protocol) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made, and has no other owner.
        Ok(Self(unsafe { File::from_raw_fd(fd) }))
    }

    /// Returns the content of each message of the answer.
    pub fn dump(&mut self, kind: u16, content: &[u8]) -> io::Result<Vec<Vec<u8>>> {
        self.0.write_all(&request(kind, content))?;
        let mut found = Vec::new();
        let mut buffer = vec![0; 1 << 16];
        loop {
            let length = self.0.read(&mut buffer)?;
            if take_messages(&buffer[..length], &mut found)? {
                return Ok(found);
            }
        }
    }
}

/// Makes the request for a list.
pub fn request(kind: u16, content: &[u8]) -> Vec<u8> {
    let mut bytes = (16 + content.len() as u32).to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend((NLM_F_REQUEST | NLM_F_DUMP).to_ne_bytes());
    // The request's number, and the sender's, which the kernel fills in.
    bytes.extend([0; 8]);
    bytes.extend(content);
    bytes
}

/// Collects the contents of messages; returns true after the last one.
pub fn take_messages(mut bytes: &[u8], found: &mut Vec<Vec<u8>>) -> io::Result<bool> {
    let malformed = || io::Error::from(io::ErrorKind::InvalidData);
    while !bytes.is_empty() {
        let length = number(bytes, 0).ok_or_else(malformed)? as usize;
        let kind = bytes.get(4..6).and_then(|two| two.try_into().ok()).map(u16::from_ne_bytes);
        let content = bytes.get(16..length).ok_or_else(malformed)?;
        match kind {
            Some(NLMSG_DONE) => return error_of(content).map(|()| true),
            Some(NLMSG_ERROR) => return error_of(content).map(|()| true),
            _ => found.push(content.to_vec()),
        }
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(false)
}

fn error_of(content: &[u8]) -> io::Result<()> {
    match number(content, 0).map(u32::cast_signed) {
        Some(error) if error < 0 => Err(io::Error::from_raw_os_error(-error)),
        _ => Ok(()),
    }
}

pub fn number(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes)
}

/// Iterates over the attributes of a message, or of another attribute: type and value.
pub fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    /// Mask that removes flags from the type.
    const TYPE_MASK: u16 = 0x3fff;
    std::iter::from_fn(move || {
        let word = |at: usize| bytes.get(at..at + 2)?.try_into().ok().map(u16::from_ne_bytes);
        let (length, kind) = (usize::from(word(0)?), word(2)? & TYPE_MASK);
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

pub fn text(value: &[u8]) -> String {
    mercury_control::status::nul_padded(value)
}

#[cfg(test)]
pub mod tests {
    /// Makes an attribute.
    pub fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = (4 + value.len() as u16).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }
}
