//! Requests to a template: one line of JSON, and lines of JSON as the answer.

use std::{
    io::{self, IoSlice, IoSliceMut, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
};

use mercury_guests::Name;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// The longest line, in bytes.
const LONGEST: usize = 1 << 20;
/// The descriptors of a console: standard input, output and error.
pub const CONSOLE: usize = 3;
/// The most descriptors that come with a line.
const MOST: usize = 32;

/// A request to a template.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Request {
    /// Start a machine with the console that comes with the request.
    Attached { name: Option<Name>, forward: Vec<String> },
    /// Start so many machines in the background.
    Detached { name: Option<Name>, count: u32, numbered: bool, forward: Vec<String> },
    /// Start so many copies of a machine that runs, in the background.
    Fork { machine: Name, name: Option<Name>, count: u32, numbered: bool, forward: Vec<String> },
    /// Give a machine that runs as it is now.
    Freeze { machine: Name },
    /// Let a machine have so many bytes of memory.
    Resize { machine: Name, bytes: u64 },
    /// Put a machine to sleep.
    Sleep { machine: Name },
    /// Let a machine go on that is asleep.
    Wake { machine: Name },
    /// Remove a machine that is asleep.
    Discard { machine: Name },
    /// End.
    End,
}

/// A part of the answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    Started {
        machines: Vec<Name>,
        /// The time in which a machine that was copied stood still.
        pause_us: Option<u64>,
    },
    /// A machine as it was. With the line come the file of its state, one with the places of pages, and the
    /// files of its memory.
    Frozen { pause_us: u64 },
    /// The machine's kernel was asked for so many bytes, and so many bytes of zeros went to the host.
    Resized { balloon_bytes: u64, zero_bytes: u64 },
    /// The machine is asleep, in this file.
    Asleep { file: PathBuf },
    /// The machine is no more.
    Gone,
    /// No machine was started. The machines that were are named.
    Refused { message: String, hint: Option<String>, machines: Vec<Name> },
    /// The machine that was started with the console has ended with this status, or by a signal.
    Ended { status: Option<i32>, signal: Option<i32> },
}

/// Sends a value as a line.
///
/// # Errors
/// If the other end is gone.
pub fn send(mut to: &UnixStream, value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    to.write_all(&line)
}

/// Sends a value as a line, with descriptors.
///
/// # Errors
/// If the other end is gone.
pub fn send_with(to: &UnixStream, value: &impl Serialize, files: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut extra = SendAncillaryBuffer::new(&mut space);
    if !extra.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let sent = sendmsg(to, &[IoSlice::new(&line)], &mut extra, SendFlags::NOSIGNAL)?;
    (&*to).write_all(&line[sent..])
}

/// Receives a line, and the descriptors that come with it. Returns nothing at the end.
///
/// # Errors
/// If the other end is gone in the middle of a line, or the line is no value.
pub fn receive<T: DeserializeOwned>(from: &UnixStream) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let (mut line, mut descriptors) = (Vec::new(), Vec::new());
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    loop {
        let mut extra = RecvAncillaryBuffer::new(&mut space);
        let received = recvmsg(from, &mut [IoSliceMut::new(&mut byte)], &mut extra, RecvFlags::CMSG_CLOEXEC)?;
        for message in extra.drain() {
            if let RecvAncillaryMessage::ScmRights(sent) = message {
                descriptors.extend(sent);
            }
        }
        match (received.bytes, byte[0]) {
            (0, _) if line.is_empty() => return Ok(None),
            (0, _) => return Err(io::ErrorKind::UnexpectedEof.into()),
            (_, b'\n') => break,
            (_, byte) => line.push(byte),
        }
        if line.len() > LONGEST {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
    Ok(Some((serde_json::from_slice(&line)?, descriptors)))
}

/// Waits until the other end is closed.
pub fn await_end(from: &mut UnixStream) {
    let _ = from.read(&mut [0]);
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::{
        fs::File,
        os::fd::{AsFd, AsRawFd},
    };

    use super::*;

    #[test]
    fn requests_arrive_with_their_descriptors() {
        let (a, b) = UnixStream::pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"there").unwrap();
        let request = Request::Attached { name: Some("web".parse().unwrap()), forward: vec!["80".into()] };
        send_with(&a, &request, &[file.as_fd(), file.as_fd(), file.as_fd()]).unwrap();
        send(&a, &Request::End).unwrap();
        let (first, descriptors) = receive::<Request>(&b).unwrap().unwrap();
        assert_eq!((first, descriptors.len()), (request, CONSOLE));
        let other = File::from(descriptors.into_iter().next().unwrap());
        assert_ne!(other.as_raw_fd(), file.as_raw_fd());
        assert_eq!(other.metadata().unwrap().len(), 5);
        assert_eq!(receive::<Request>(&b).unwrap().unwrap().0, Request::End);
        drop(a);
        assert!(receive::<Request>(&b).unwrap().is_none());
    }

    #[test]
    fn what_is_no_request_is_an_error() {
        for wrong in ["{\"attached\":{\"name\":\"../x\",\"forward\":[]}}\n", "nothing\n", "\"end\""] {
            let (mut a, b) = UnixStream::pair().unwrap();
            a.write_all(wrong.as_bytes()).unwrap();
            drop(a);
            assert!(receive::<Request>(&b).is_err(), "{wrong}");
        }
    }
}
