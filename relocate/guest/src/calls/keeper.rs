//! A copy of this process that keeps the guest's memory as it was at the instant. The host copies a page when
//! the guest or a device writes to it.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::{fd::AsRawFd, unix::net::UnixStream},
    ptr,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use crate::layout::PAGE_BYTES;

/// Time for the answer, in moments. The host may have to read pages from its swap areas.
const PATIENCE: u32 = 600;
const MOMENT: Duration = Duration::from_millis(100);
/// Time for the copy to end. Applications of the guest may stand still meanwhile.
const ENDS_WITHIN: Duration = Duration::from_secs(10);
/// Time between two looks at a copy that is about to end.
const LOOK: Duration = Duration::from_millis(1);
const PAGE: usize = PAGE_BYTES as usize;
/// Most frames of one request.
const FRAMES_MAX: usize = 16;

/// A request for frames: how many, and their addresses in this process. 0 stands for a page of zeros, and a
/// request for no frames ends the copy.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Request {
    count: usize,
    frames: [usize; FRAMES_MAX],
}

const REQUEST: usize = size_of::<Request>();

/// The kernel's place for the likelihood that it kills this process when memory is short.
const OOM_SCORE: &str = "/proc/self/oom_score_adj";
/// Score of a process that is killed first.
const KILLED_FIRST: &str = "1000";
/// Held while the score of this process is read or differs from its own.
static SCORED: Mutex<()> = Mutex::new(());

/// This process's score for the kernel's OOM killer.
#[derive(Debug)]
struct Score {
    /// Stays open, because the monitor may open no files later.
    file: File,
    own: String,
}

impl Score {
    fn open() -> io::Result<Self> {
        let _held = hold_score();
        let mut file = File::options().read(true).write(true).open(OOM_SCORE)?;
        let mut own = String::new();
        file.read_to_string(&mut own)?;
        Ok(Self { file, own })
    }

    /// Sets a score. Each may be set without privileges that is not lower than the one that a process began
    /// with. A score that is not taken changes nothing.
    fn set(&self, score: &str) {
        let _ = (&self.file).write_all(score.as_bytes());
    }
}

fn hold_score() -> MutexGuard<'static, ()> {
    SCORED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The means of copies of this process, one after the other.
#[derive(Debug)]
pub struct Keeper {
    own: UnixStream,
    theirs: UnixStream,
    /// Pages that both processes share.
    pages: *mut u8,
    length: usize,
    child: Option<libc::pid_t>,
    /// `None` if the host has no /proc.
    score: Option<Score>,
    /// The copy has not answered. What was asked and answered since may still come, until it has ended.
    is_broken: bool,
    /// Time for the copy to end.
    ends_within: Duration,
}

// SAFETY: The pages belong to this value alone.
unsafe impl Send for Keeper {}

impl Keeper {
    /// Makes the means for requests of at most `most` frames. Copies need no more rights than to be made.
    ///
    /// # Errors
    /// The host has no room for pages or sockets.
    pub fn new(most: usize) -> io::Result<Self> {
        assert!(most <= FRAMES_MAX, "more frames than a request has");
        let (own, theirs) = UnixStream::pair()?;
        own.set_read_timeout(Some(MOMENT))?;
        let length = most * PAGE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        // SAFETY: The host chooses the address.
        let pages = unsafe { libc::mmap(ptr::null_mut(), length, access, flags, -1, 0) };
        if pages == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let score = Score::open().ok();
        let ends_within = ENDS_WITHIN;
        Ok(Self {
            own,
            theirs,
            pages: pages.cast(),
            length,
            child: None,
            score,
            is_broken: false,
            ends_within,
        })
    }

    /// Makes the copy: it has the memory of this process as it is now. If the host's memory is short, the
    /// kernel kills the copy, and not the guest: the copy is as large as the guest, and has a higher score.
    ///
    /// # Errors
    /// There is a copy already, or the host has no room for one.
    pub fn start(&mut self) -> io::Result<()> {
        // One that did not end in time may have ended since.
        if self.child.is_some() && self.refuse_ended().is_ok() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        self.drain();
        self.is_broken = false;
        let held = hold_score();
        if let Some(score) = &self.score {
            score.set(KILLED_FIRST);
        }
        // SAFETY: The child takes no lock, allocates nothing and ends by itself: see `serve`.
        let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
        if child == 0 {
            serve(self.own.as_raw_fd(), self.theirs.as_raw_fd(), self.pages);
        }
        let made = if child > 0 { Ok(child as libc::pid_t) } else { Err(io::Error::last_os_error()) };
        if let Some(score) = &self.score {
            score.set(&score.own);
        }
        drop(held);
        self.child = Some(made?);
        Ok(())
    }

    /// Drops requests and answers of the copy before, which has ended.
    fn drain(&self) {
        let mut bytes = [0; REQUEST];
        for end in [&self.own, &self.theirs] {
            // SAFETY: The kernel writes at most as many bytes as there are.
            while unsafe {
                libc::recv(end.as_raw_fd(), bytes.as_mut_ptr().cast(), REQUEST, libc::MSG_DONTWAIT)
            } > 0
            {}
        }
    }

    /// Reads frames as they were when the copy was made; `None` is a page of zeros. Each must be a page of
    /// this process's memory, which stays mapped.
    ///
    /// # Errors
    /// The copy does not answer. It does not answer any more, then.
    pub fn read(
        &mut self,
        frames: &[Option<*const u8>],
        mut put: impl FnMut(usize, &[u8]) -> Option<()>,
    ) -> io::Result<()> {
        if frames.is_empty() {
            return Ok(());
        }
        if self.child.is_none() || self.is_broken || frames.len() * PAGE > self.length {
            return Err(io::ErrorKind::NotConnected.into());
        }
        let mut request = Request { count: frames.len(), ..Request::default() };
        for (to, frame) in request.frames.iter_mut().zip(frames) {
            *to = frame.map_or(0, <*const u8>::expose_provenance);
        }
        let asked = self.own.write_all(as_bytes(&request));
        if let Err(error) = asked.and_then(|()| self.hear()) {
            self.is_broken = true;
            return Err(error);
        }
        for number in 0..frames.len() {
            // SAFETY: The page is one of this value's, and the copy writes to it only after a request.
            let page = unsafe { std::slice::from_raw_parts(self.pages.add(number * PAGE), PAGE) };
            put(number, page).ok_or(io::ErrorKind::InvalidInput)?;
        }
        Ok(())
    }

    /// Waits for the copy's answer.
    fn hear(&mut self) -> io::Result<()> {
        for _ in 0..PATIENCE {
            match self.own.read(&mut [0]) {
                Ok(1) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.refuse_ended()?,
                other => return Err(other.err().unwrap_or(io::ErrorKind::UnexpectedEof.into())),
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    fn refuse_ended(&mut self) -> io::Result<()> {
        let Some(child) = self.child else { return Ok(()) };
        // SAFETY: It takes a number, and no place for the status.
        if unsafe { libc::waitpid(child, ptr::null_mut(), libc::WNOHANG) } == 0 {
            return Ok(());
        }
        self.child = None;
        Err(io::ErrorKind::BrokenPipe.into())
    }

    #[cfg(test)]
    pub fn signal(&self, signal: libc::c_int) {
        // SAFETY: The child is not waited for yet.
        unsafe { libc::kill(self.child.expect("a copy"), signal) };
    }

    #[cfg(test)]
    pub fn be_impatient(&mut self) {
        self.ends_within = MOMENT;
    }

    /// Ends the copy, if there is one. A copy that does not end in time, because it was stopped, is left.
    pub fn end(&mut self) {
        // A word more for a copy that was left is none too many: it ends at the first.
        if self.child.is_none() || self.own.write_all(as_bytes(&Request::default())).is_err() {
            self.is_broken = self.child.is_some();
            return;
        }
        let start = Instant::now();
        while self.refuse_ended().is_ok() && self.child.is_some() {
            if start.elapsed() >= self.ends_within {
                self.is_broken = true;
                return;
            }
            thread::sleep(LOOK);
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.end();
        // SAFETY: Nobody has a reference to the pages any more.
        unsafe { libc::munmap(self.pages.cast(), self.length) };
    }
}

fn as_bytes(request: &Request) -> &[u8; REQUEST] {
    // SAFETY: The structure has no padding.
    unsafe { &*ptr::from_ref(request).cast() }
}

/// Answers requests until there are no more, in the copy. Of the threads of this process only this one was
/// copied, so that a lock may be held for ever and the heap be half changed: neither is used here.
fn serve(parents: i32, own: i32, pages: *mut u8) -> ! {
    let mut request = Request::default();
    // SAFETY: The descriptors are open and the frames are mapped, for they were in the parent. Each request
    // is written at once and whole.
    unsafe {
        // The parent's end is then the parent's alone, and closed when the parent has ended.
        libc::close(parents);
        while libc::read(own, (&raw mut request).cast(), REQUEST) == REQUEST as isize {
            if request.count == 0 || request.count > FRAMES_MAX {
                break;
            }
            let mut number = 0;
            while number < request.count {
                let (from, to) = (request.frames[number], pages.add(number * PAGE));
                if from == 0 {
                    ptr::write_bytes(to, 0, PAGE);
                } else {
                    ptr::copy_nonoverlapping(ptr::with_exposed_provenance::<u8>(from), to, PAGE);
                }
                number += 1;
            }
            if libc::write(own, (&raw const request.count).cast(), 1) != 1 {
                break;
            }
        }
        libc::_exit(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_copy_is_killed_before_the_guest() {
        let mut keeper = Keeper::new(1).expect("a keeper");
        let before = keeper.score.as_ref().expect("a score").own.clone();
        for _ in 0..2 {
            keeper.start().expect("a copy");
            let child = keeper.child.expect("a copy");
            let score = fs::read_to_string(format!("/proc/{child}/oom_score_adj")).expect("a score");
            assert_eq!(score.trim(), KILLED_FIRST);
            let held = hold_score();
            assert_eq!(fs::read_to_string(OOM_SCORE).expect("a score"), before);
            drop(held);
            keeper.end();
        }
    }
}
