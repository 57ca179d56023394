//! Several requests of a disk at once, by the host's io_uring.
//!
//! A ring does its work in the host's kernel, where the filter of system calls does not see it. So
//! the ring is restricted before the guest runs: it reads, writes and flushes, and only the one
//! file that was registered with it.

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, RawFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use io_uring::{IoUring, opcode, register::Restriction, squeue, types};

use crate::{
    bell::Bell,
    signals::{Waker, start_thread},
};

/// At once; the ring has room for the answers to twice as many.
const MOST: u32 = 128;
const FILE: types::Fixed = types::Fixed(0);
/// The flag of requests that name a registered file.
const REGISTERED: u8 = 1;

/// An operation on the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// To read into these parts of memory, from an offset on.
    Read(u64),
    /// To write these parts of memory, from an offset on.
    Write(u64),
    /// To have on the disk all that was written before.
    Flush,
}

/// The ring and what it is asked.
pub struct Requests<T> {
    ring: IoUring,
    bell: Arc<Bell>,
    has_ended: Arc<AtomicBool>,
    /// The requests by number: the parts of memory that the ring uses, and the asker's own value.
    asked: Vec<Option<(Vec<libc::iovec>, T)>>,
    free: Vec<usize>,
}

// SAFETY: The parts are places of memory that the ring uses. No thread uses them by these addresses.
unsafe impl<T: Send> Send for Requests<T> {}

impl<T> std::fmt::Debug for Requests<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Requests").field("free", &self.free.len()).finish_non_exhaustive()
    }
}

impl<T> Requests<T> {
    /// Makes a ring for a file. From now on the waker is called when an answer has come for which
    /// no thread waits.
    ///
    /// # Errors
    /// If the host has no such rings, or does not let this process have one, or not a restricted one.
    pub fn new(file: &File, waker: Waker) -> io::Result<Self> {
        let ring = IoUring::builder().setup_r_disabled().build(MOST)?;
        let bell = Arc::new(Bell::new().map_err(|error| io::Error::other(error.to_string()))?);
        let submitter = ring.submitter();
        submitter.register_files(&[file.as_raw_fd()])?;
        submitter.register_eventfd(bell.as_raw_fd())?;
        submitter.register_restrictions(&mut [
            Restriction::sqe_op(opcode::Readv::CODE),
            Restriction::sqe_op(opcode::Writev::CODE),
            Restriction::sqe_op(opcode::Fsync::CODE),
            Restriction::sqe_flags_allowed(REGISTERED),
            Restriction::sqe_flags_required(REGISTERED),
        ])?;
        submitter.register_enable_rings()?;
        let has_ended = Arc::default();
        listen(Arc::clone(&bell), Arc::clone(&has_ended), waker)?;
        let free = (0..MOST as usize).collect();
        Ok(Self { ring, bell, has_ended, asked: (0..MOST).map(|_| None).collect(), free })
    }

    /// Returns the ring's descriptor.
    #[must_use]
    pub fn descriptor(&self) -> RawFd {
        self.ring.as_raw_fd()
    }

    /// Returns true if another request may be made.
    #[must_use]
    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Returns true if no answer is missing.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.free.len() == self.asked.len()
    }

    /// Makes a request, which is begun by [`Self::submit`]. There has to be room for it.
    ///
    /// # Safety
    /// The parts of memory stay what they are until the answer has come.
    pub unsafe fn ask(&mut self, operation: Operation, parts: Vec<libc::iovec>, what: T) {
        let Some(number) = self.free.pop() else { return };
        let (start, count) = (parts.as_ptr(), parts.len() as u32);
        let entry: squeue::Entry = match operation {
            Operation::Read(at) => opcode::Readv::new(FILE, start, count).offset(at).build(),
            Operation::Write(at) => opcode::Writev::new(FILE, start, count).offset(at).build(),
            Operation::Flush => opcode::Fsync::new(FILE).flags(types::FsyncFlags::DATASYNC).build(),
        };
        self.asked[number] = Some((parts, what));
        // SAFETY: The list of parts is kept until the answer has come, and the caller keeps the
        // parts. There is room: the requests are never more than the ring's entries.
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(number as u64)) };
        debug_assert!(pushed.is_ok());
    }

    /// Begins the requests, and hands over each answer that is already there: the asker's value,
    /// and the result as of the system call, with an error's number below zero.
    pub fn submit(&mut self, mut answer: impl FnMut(T, i32)) {
        // What is answered at once needs no waker.
        self.ring.completion().disable_eventfd();
        let submitted = self.ring.submit();
        self.take(&mut answer);
        self.ring.completion().enable_eventfd();
        self.take(&mut answer);
        if submitted.is_err() {
            // Interrupted, or the host has no memory for it now: it stays in the ring.
            self.bell.ring();
        }
    }

    /// Waits until there is no request.
    pub fn finish(&mut self) {
        while !self.is_idle() {
            // If it is interrupted it waits again.
            let _ = self.ring.submit_and_wait(1);
            self.take(&mut |_, _| {});
        }
    }

    fn take(&mut self, answer: &mut impl FnMut(T, i32)) {
        let Self { ring, asked, free, .. } = self;
        for found in ring.completion() {
            let number = found.user_data() as usize;
            if let Some((_, what)) = asked.get_mut(number).and_then(Option::take) {
                free.push(number);
                answer(what, found.result());
            }
        }
    }
}

impl<T> Drop for Requests<T> {
    fn drop(&mut self) {
        self.finish();
        self.has_ended.store(true, Ordering::Release);
        self.bell.ring();
    }
}

/// Starts a thread that calls the waker when the bell rings.
fn listen(bell: Arc<Bell>, has_ended: Arc<AtomicBool>, waker: Waker) -> io::Result<()> {
    start_thread("disk", move || {
        while !has_ended.load(Ordering::Acquire) {
            bell.wait();
            waker();
        }
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn ring() -> (Requests<u32>, tempfile::NamedTempFile) {
        let file = tempfile::NamedTempFile::new().unwrap();
        (Requests::new(file.as_file(), crate::testing::waker()).unwrap(), file)
    }

    fn answers(ring: &mut Requests<u32>) -> Vec<(u32, i32)> {
        let mut found = Vec::new();
        while !ring.is_idle() {
            ring.submit(|what, result| found.push((what, result)));
        }
        found
    }

    #[test]
    fn many_requests_are_answered_each_once() {
        let (mut ring, file) = ring();
        let text = *b"mercury!";
        let part = libc::iovec { iov_base: text.as_ptr().cast_mut().cast(), iov_len: text.len() };
        for number in 0..100 {
            // SAFETY: The text outlives the answers.
            unsafe { ring.ask(Operation::Write(u64::from(number) * 8), vec![part], number) };
        }
        // SAFETY: There is no memory.
        unsafe { ring.ask(Operation::Flush, Vec::new(), 100) };
        let mut all = answers(&mut ring);
        all.sort_unstable();
        let expected: Vec<(u32, i32)> = (0..100).map(|number| (number, 8)).chain([(100, 0)]).collect();
        assert_eq!(all, expected);
        assert_eq!(std::fs::read(file.path()).unwrap(), text.repeat(100));
    }

    #[test]
    fn the_ring_does_nothing_else_and_to_no_other_file() {
        let (mut ring, _file) = ring();
        let mut byte = 0_u8;
        let part = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        let other = types::Fd(libc::STDIN_FILENO);
        let path = c"/etc/hostname".as_ptr();
        for entry in [
            opcode::OpenAt::new(types::Fd(libc::AT_FDCWD), path).build(),
            opcode::Nop::new().build(),
            opcode::Readv::new(other, &raw const part, 1).build(),
            opcode::Readv::new(types::Fixed(1), &raw const part, 1).build(),
            opcode::Readv::new(FILE, &raw const part, 1)
                .build()
                .flags(squeue::Flags::FIXED_FILE | squeue::Flags::IO_LINK),
        ] {
            let number = ring.free.pop().unwrap();
            ring.asked[number] = Some((Vec::new(), 7));
            // SAFETY: What it points to outlives the answer.
            unsafe { ring.ring.submission().push(&entry.clone().user_data(number as u64)) }.unwrap();
            let [(7, result)] = answers(&mut ring)[..] else { panic!("no answer") };
            assert!(result == -libc::EACCES || result == -libc::EBADF, "{entry:?}: {result}");
        }
        assert!(ring.ring.submitter().unregister_files().is_err());
    }
}
