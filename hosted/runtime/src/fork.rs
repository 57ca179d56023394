//! A fork of a running machine: the conversation of its template with it.
//!
//! The template asks by a byte on a socket and a signal ([`Source::freeze`]). The machine answers between two
//! exits of the guest ([`Link`]): its state, where each page of its memory is, and the file that was its own
//! until then ([`crate::memory::layers::Layers::freeze`]). Then the machine goes on. The template seals the
//! file as soon as none of the machine's processes has it mapped for writing. It starts copies as those of a
//! saved machine ([`crate::template`]).

use std::{
    fs::File,
    io::{self, Read, Write},
    mem,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::{fs::FileExt, net::UnixStream},
    },
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use mercury_devices::state::{Reader, Writer};

use crate::{
    error::{Error, Result},
    layout::PAGE,
    memory::{
        layers::{Frozen, Run},
        new_file, seal,
    },
};

/// The signal that tells a machine to look at its socket. A process that does not handle it yet ignores it.
pub const CALL: i32 = libc::SIGURG;
/// The request.
const FORK: u8 = b'F';
/// The first byte of the answer: a machine follows, or the reason for which it does not.
const FROZEN: u8 = b'S';
const REFUSED: u8 = b'R';
/// The time in which a machine answers. A guest that has switched interrupts off answers late.
const PATIENCE: Duration = Duration::from_secs(5);
/// The time between two attempts to seal a file.
const MOMENT: Duration = Duration::from_micros(200);
/// The largest answer that is believed, in bytes.
const ANSWER_AT_MOST: u64 = 64 << 20;
/// The number of files from which those above the lowest become one.
const MOST_FILES: usize = 16;
/// The number of bytes that are copied at once.
const PIECE: usize = 1 << 20;

/// A machine at an instant, from which others begin.
#[derive(Debug)]
pub struct Image {
    /// The sealed files of its memory.
    pub files: Vec<Arc<OwnedFd>>,
    /// Where each page is, as for [`crate::memory::layers::Layers::new`].
    pub runs: Vec<Run>,
    /// The state ([`crate::saved`]).
    pub state: Vec<u8>,
}

/// A fork that has succeeded.
#[derive(Debug)]
pub struct Forked {
    pub image: Arc<Image>,
    /// The time in which the machine stood still.
    pub pause: Duration,
}

/// The template's way to a machine.
#[derive(Debug)]
pub struct Source {
    socket: UnixStream,
    process: i32,
    /// The image from which the machine began.
    image: Arc<Image>,
    /// The files that were the machine's own.
    frozen: Vec<Arc<OwnedFd>>,
    /// True if the machine has not answered in time: what it sends later is the answer to an earlier request.
    is_lost: bool,
}

/// A machine's way to its template.
#[derive(Debug)]
pub struct Link(OwnedFd);

/// Makes both ends of a connection.
///
/// # Errors
/// If the host refuses.
pub fn pair() -> Result<(UnixStream, Link)> {
    let wrong = |_| Error::system("make a socket for forks");
    let (template, machine) = UnixStream::pair().map_err(wrong)?;
    machine.set_nonblocking(true).map_err(wrong)?;
    template.set_read_timeout(Some(PATIENCE)).map_err(wrong)?;
    Ok((template, Link(machine.into())))
}

impl Link {
    /// Returns the socket.
    #[must_use]
    pub fn descriptor(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Returns true if the template has asked for a fork since this function was called.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        let mut requests = [0; 16];
        // SAFETY: There is room for so many bytes.
        let read = unsafe { libc::read(self.descriptor(), requests.as_mut_ptr().cast(), requests.len()) };
        usize::try_from(read).is_ok_and(|count| requests[..count].contains(&FORK))
    }

    /// Tells the template why the machine cannot be forked.
    pub fn refuse(&self, why: &str) {
        self.answer(REFUSED, why.as_bytes(), None);
    }

    /// Sends the machine. `pause` is the time in which it stood still.
    pub fn send(&self, frozen: &Frozen, state: &[u8], pause: Duration) {
        let mut to = Writer::default();
        to.number(pause.as_nanos() as u64);
        to.bytes(state);
        to.number(frozen.runs.len() as u64);
        for Run { pages, level } in &frozen.runs {
            to.numbers([pages.start, pages.end, (*level).into()]);
        }
        self.answer(FROZEN, &to.finish(), Some(frozen.file));
    }

    /// Sends an answer. If the template is gone, or does not read, it gets none, or a part.
    fn answer(&self, kind: u8, bytes: &[u8], file: Option<RawFd>) {
        let head = [&[kind][..], &(bytes.len() as u64).to_le_bytes(), bytes].concat();
        let mut part = libc::iovec { iov_base: head.as_ptr().cast_mut().cast(), iov_len: head.len() };
        let mut control = Control::default();
        // SAFETY: All zeros are a valid message.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        if let Some(file) = file {
            control.hold(file, &mut message);
        }
        // SAFETY: The message and all that it points to live until the call has returned.
        unsafe { libc::sendmsg(self.descriptor(), &raw const message, libc::MSG_NOSIGNAL) };
    }
}

/// Room for a descriptor beside a message.
#[repr(C, align(8))]
#[derive(Default)]
struct Control([u8; CONTROL]);

// SAFETY: It computes a number.
const CONTROL: usize = unsafe { libc::CMSG_SPACE(size_of::<RawFd>() as u32) } as usize;

impl Control {
    /// Puts a descriptor beside a message.
    fn hold(&mut self, file: RawFd, message: &mut libc::msghdr) {
        message.msg_control = self.0.as_mut_ptr().cast();
        message.msg_controllen = CONTROL;
        // SAFETY: The room is aligned and large enough for one descriptor, which the constant says.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as u32) as usize;
            libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(file);
        }
    }

    /// Returns the descriptor beside a message that was received.
    fn take(message: &libc::msghdr) -> Option<OwnedFd> {
        // SAFETY: The host has filled the room, and says how much of it. A descriptor has no other owner.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(message);
            if header.is_null() || (*header).cmsg_type != libc::SCM_RIGHTS {
                return None;
            }
            let file = libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned();
            Some(OwnedFd::from_raw_fd(file))
        }
    }
}

impl Source {
    /// Makes the way to a machine that began from an image in a process of this number.
    #[must_use]
    pub fn new(socket: UnixStream, process: i32, image: Arc<Image>) -> Self {
        Self { socket, process, image, frozen: Vec::new(), is_lost: false }
    }

    /// Takes the machine as it is now. The machine goes on.
    ///
    /// # Errors
    /// If the machine cannot be forked, or does not answer.
    pub fn freeze(&mut self) -> Result<Forked> {
        if self.is_lost {
            return Err(no_answer("the machine has not answered an earlier request"));
        }
        let asked = self.socket.write_all(&[FORK]);
        asked.map_err(|error| no_answer(&format!("the machine is gone: {error}")))?;
        // SAFETY: It takes numbers. The process is a child that was not waited for, so the number is its own.
        unsafe { libc::kill(self.process, CALL) };
        let (bytes, file) = self.hear().map_err(|error| {
            self.is_lost = true;
            no_answer(&format!("the machine does not answer: {error}"))
        })??;
        let file = file.ok_or_else(|| Error::new("the machine has sent no memory: this is a bug"))?;
        let mut from = Reader::new(&bytes);
        let pause = Duration::from_nanos(from.number()?);
        let state = from.bytes()?.to_vec();
        let count: u64 = from.number()?;
        let mut runs = Vec::new();
        for _ in 0..count {
            let (start, end, level): (u64, u64, u64) = (from.number()?, from.number()?, from.number()?);
            let level = u8::try_from(level).map_err(|_| Error::new("a level is too high: this is a bug"))?;
            runs.push(Run { pages: start..end, level });
        }
        from.finish()?;
        await_seal(&file)?;
        self.frozen.push(Arc::new(file));
        let files: Vec<Arc<OwnedFd>> = self.image.files.iter().chain(&self.frozen).cloned().collect();
        check(&files, &runs)?;
        let (files, runs) = if files.len() > MOST_FILES { flatten(&files, &runs)? } else { (files, runs) };
        Ok(Forked { image: Arc::new(Image { files, runs, state }), pause })
    }

    /// Receives an answer: bytes and perhaps a descriptor, or the reason for which there are none.
    fn hear(&mut self) -> io::Result<Result<(Vec<u8>, Option<OwnedFd>)>> {
        let mut kind = [0];
        let mut control = Control::default();
        let mut part = libc::iovec { iov_base: kind.as_mut_ptr().cast(), iov_len: kind.len() };
        // SAFETY: All zeros are a valid message.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        (message.msg_control, message.msg_controllen) = (control.0.as_mut_ptr().cast(), CONTROL);
        loop {
            let flags = libc::MSG_CMSG_CLOEXEC;
            // SAFETY: The message and all that it points to live until the call has returned.
            match unsafe { libc::recvmsg(self.socket.as_raw_fd(), &raw mut message, flags) } {
                1 => break,
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                _ if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
                _ => return Err(io::Error::last_os_error()),
            }
        }
        let file = Control::take(&message);
        let mut length = [0; 8];
        self.socket.read_exact(&mut length)?;
        let length = u64::from_le_bytes(length);
        if length > ANSWER_AT_MOST {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut bytes = vec![0; length as usize];
        self.socket.read_exact(&mut bytes)?;
        Ok(match kind[0] {
            FROZEN => Ok((bytes, file)),
            _ => Err(Error::new(String::from_utf8_lossy(&bytes))
                .hint("the machine goes on, and others can be forked")),
        })
    }
}

fn no_answer(why: &str) -> Error {
    Error::new(why).hint("`mercury disco list` shows if it runs; the host may be overloaded")
}

/// Seals the file when all processes of the machine have followed.
fn await_seal(file: &OwnedFd) -> Result<()> {
    let start = Instant::now();
    loop {
        match seal(file) {
            Ok(()) => return Ok(()),
            Err(error) if start.elapsed() > PATIENCE => return Err(error),
            Err(_) => thread::sleep(MOMENT),
        }
    }
}

/// Checks that runs are in order, and in files that are there or in the one above them.
fn check(files: &[Arc<OwnedFd>], runs: &[Run]) -> Result<()> {
    let are_in_order = runs.is_sorted_by(|a, b| a.pages.end <= b.pages.start);
    let are_there = runs.iter().all(|run| usize::from(run.level) <= files.len() && !run.pages.is_empty());
    match are_in_order && are_there {
        true => Ok(()),
        false => Err(Error::new("the machine has sent no map of its memory: this is a bug")),
    }
}

/// Makes one file of all but the lowest.
fn flatten(files: &[Arc<OwnedFd>], runs: &[Run]) -> Result<(Vec<Arc<OwnedFd>>, Vec<Run>)> {
    let wrong = |error: io::Error| {
        Error::new(format!("cannot copy a machine's memory: {error}"))
            .hint("the host may have no memory left")
    };
    let all: Vec<File> = files
        .iter()
        .map(|file| file.try_clone().map(File::from))
        .collect::<io::Result<_>>()
        .map_err(wrong)?;
    let flat = new_file(c"mercury-hosted", all[0].metadata().map_err(wrong)?.len(), libc::MFD_ALLOW_SEALING)?;
    let flat = File::from(flat);
    let mut piece = vec![0; PIECE];
    let mut flat_runs = Vec::new();
    for Run { pages, level } in runs {
        let Some(from) = all.get(usize::from(*level)) else {
            flat_runs.push(Run { pages: pages.clone(), level: 2 });
            continue;
        };
        let (mut at, end) = (pages.start * PAGE, pages.end * PAGE);
        while at < end {
            let piece = &mut piece[..PIECE.min((end - at) as usize)];
            from.read_exact_at(piece, at).and_then(|()| flat.write_all_at(piece, at)).map_err(wrong)?;
            at += piece.len() as u64;
        }
        flat_runs.push(Run { pages: pages.clone(), level: 1 });
    }
    let flat = OwnedFd::from(flat);
    seal(&flat)?;
    Ok((vec![Arc::clone(&files[0]), Arc::new(flat)], flat_runs))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const PAGES: u64 = 40;

    fn file(word: u64) -> Arc<OwnedFd> {
        let file = File::from(new_file(c"test", PAGES * PAGE, libc::MFD_ALLOW_SEALING).unwrap());
        (0..PAGES).for_each(|page| file.write_all_at(&(page + word).to_le_bytes(), page * PAGE).unwrap());
        Arc::new(file.into())
    }

    fn run(start: u64, end: u64, level: u8) -> Run {
        Run { pages: start..end, level }
    }

    fn image() -> Arc<Image> {
        Arc::new(Image { files: vec![file(0)], runs: vec![run(30, 40, 1)], state: vec![] })
    }

    fn word(image: &Image, page: u64) -> u64 {
        let level = image.runs.iter().find(|run| run.pages.contains(&page)).map_or(0, |run| run.level);
        let mut word = [0; 8];
        if let Some(file) = image.files.get(usize::from(level)) {
            File::from(file.try_clone().unwrap()).read_exact_at(&mut word, page * PAGE).unwrap();
        }
        u64::from_le_bytes(word)
    }

    /// Stands for a machine that is forked again and again.
    #[test]
    fn a_template_gets_what_a_machine_sends() {
        let (socket, link) = pair().unwrap();
        let mut source = Source::new(socket, std::process::id() as i32, image());
        assert!(!link.is_wanted());
        let own = file(1000);
        let answers = thread::spawn(move || {
            while !link.is_wanted() {
                thread::sleep(MOMENT);
            }
            let runs = vec![run(2, 5, 1), run(35, 40, 2)];
            link.send(&Frozen { file: own.as_raw_fd(), runs }, b"state", Duration::from_micros(9));
            while !link.is_wanted() {
                thread::sleep(MOMENT);
            }
            link.refuse("not now");
        });
        let Forked { image, pause } = source.freeze().unwrap();
        assert_eq!(
            (pause, &image.state[..], image.files.len()),
            (Duration::from_micros(9), &b"state"[..], 2)
        );
        assert_eq!([1, 2, 4, 5].map(|page| word(&image, page)), [1, 1002, 1004, 5]);
        assert!(File::from(image.files[1].try_clone().unwrap()).write_at(b"x", 0).is_err(), "it is sealed");
        assert!(source.freeze().unwrap_err().message().contains("not now"));
        answers.join().unwrap();
        assert!(source.freeze().unwrap_err().message().contains("gone"), "its machine has ended");
    }

    #[test]
    fn wrong_maps_are_refused() {
        let files = [file(0), file(1)];
        check(&files, &[run(2, 5, 1), run(5, 7, 2)]).unwrap();
        for runs in [[run(2, 5, 1), run(4, 7, 2)], [run(2, 5, 1), run(6, 7, 3)], [run(2, 2, 1), run(6, 7, 0)]]
        {
            assert!(check(&files, &runs).is_err(), "{runs:?}");
        }
    }

    #[test]
    fn many_files_become_two() {
        let files = [0, 1000, 2000, 3000].map(file);
        let runs = vec![run(0, 3, 2), run(5, 9, 1), run(9, 12, 3), run(20, 30, 4)];
        let before = Image { files: files.to_vec(), runs: runs.clone(), state: vec![] };
        let (files, runs) = flatten(&files, &runs).unwrap();
        let after = Image { files, runs, state: vec![] };
        assert_eq!(after.files.len(), 2);
        (0..PAGES).for_each(|page| assert_eq!(word(&after, page), word(&before, page), "{page}"));
        assert!(after.runs.iter().any(|one| *one == run(20, 30, 2)), "{:?}", after.runs);
    }
}
