//! A fork of a running machine: the conversation of its template with it.
//!
//! The template asks by a message on a socket and a signal ([`Source::freeze`]). The machine answers between
//! two exits of the guest ([`Link`]): its state, where each page of its memory is, and the file that was its
//! own until then ([`crate::memory::layers::Layers::freeze`]). Then the machine goes on. The template seals
//! the file as soon as none of the machine's processes has it mapped for writing. It starts copies as those
//! of a saved machine ([`crate::template`]).
//!
//! A machine falls asleep in the same way ([`Source::hold`]). But it stands still until the template says
//! that all of it is in a file, and then ends. If the template says otherwise or ends, the machine goes on.
//! Before that it writes the file's [`Life`] to its [mark](Link::keep_mark): the file is void from then on.
//! So there is always exactly one of both, whichever process is killed.
//!
//! The template also sets the size of the machine's balloon, has pages of zeros removed from its file, and
//! limits its growth ([`crate::throttle`]).
//!
//! State and places go through two files that both have open, so no message is long. A program that has taken
//! over its machine can write anything there. So the template waits for a limited time, copies before it
//! checks, and lets no copy begin with places outside of the files.

use std::{
    fs::File,
    io::{self, Seek},
    mem,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::fs::{FileExt, MetadataExt},
    },
    path::Path,
    ptr,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use mercury_devices::{Size, state::Writer};

use crate::{
    error::{Error, Result},
    layout::PAGE,
    memory::{
        is_sealed,
        layers::{Frozen, MOST_FORKS, Run},
        new_file, read_at, seal,
    },
    saved::{Kind, Life, Still},
    throttle::{self, Account, Words},
};

/// The signal that tells a machine to look at its socket. A process that does not handle it yet ignores it.
pub const CALL: i32 = libc::SIGURG;
/// The kinds of requests: go on after a freeze, stand still after it, set the balloon's size, remove pages of
/// zeros; and what comes after standing still.
const FREEZE: u64 = 1;
const HOLD: u64 = 2;
const BALLOON: u64 = 3;
const TRIM: u64 = 4;
const END: u64 = 5;
const GO_ON: u64 = 6;
const HOLD_IF_IDLE: u64 = 7;
/// The reason for which a machine that is at work is not held.
pub const AT_WORK: &str = "the machine is at work";
/// The kinds of answers: the machine is in the files, or the reason for which it is not; pages were removed.
const FROZEN: u64 = 1;
const REFUSED: u64 = 2;
const TRIMMED: u64 = 3;
/// The time in which a machine answers, and its file can be sealed. A guest that has switched interrupts off
/// answers late.
const PATIENCE: Duration = Duration::from_secs(5);
/// The time in which a machine has removed the pages of zeros among those that it looks at in a moment. The
/// template needs no answer: without one, other machines wait for nothing.
const TRIM_PATIENCE: Duration = Duration::from_millis(500);
/// The time without an answer after which the template looks if the machine's processes are stopped.
const SILENCE: Duration = Duration::from_millis(50);
/// The time between two attempts to seal a file.
const MOMENT: Duration = Duration::from_micros(200);
/// The largest state and the longest list of places that are believed, in bytes.
const MOST_BYTES: u64 = 64 << 20;
/// The number of files from which those above the lowest become one.
const MOST_FILES: usize = 16;
/// The number of bytes that are copied at once.
const PIECE: usize = 1 << 20;
/// The length of a place in the list: the first page, the one after the last, the level.
const PLACE: usize = 24;

/// A machine at an instant, from which others begin.
#[derive(Debug)]
pub struct Image {
    /// The sealed files of its memory, all of the same size.
    files: Vec<Arc<OwnedFd>>,
    /// Where each page is, as for [`crate::memory::layers::Layers::new`].
    runs: Vec<Run>,
    /// Where the images of disks are ([`crate::memory::disks::Disks::runs`]).
    images: Vec<Run>,
    /// The state ([`crate::saved`]), in a file: only the machine's own copies get it.
    state: File,
}

impl Image {
    /// Takes an image from files, which must be sealed.
    ///
    /// # Errors
    /// If a page is in none of these files, or a file can still be written to.
    pub fn new(files: Vec<Arc<OwnedFd>>, runs: Vec<Run>, images: Vec<Run>, state: File) -> Result<Self> {
        let image = Self { files, runs, images, state };
        image
            .check()
            .map_err(|what| Error::new(format!("the machine's memory is wrong ({what}): this is a bug")))?;
        Ok(image)
    }

    /// Takes an image whose state is in memory.
    ///
    /// # Errors
    /// As for [`Self::new`], or if the host refuses a file.
    pub fn with_state(files: Vec<OwnedFd>, runs: Vec<Run>, images: Vec<Run>, state: &[u8]) -> Result<Self> {
        let file = File::from(new_file(c"mercury-state", 0, 0)?);
        file.write_all_at(state, 0).map_err(|error| {
            Error::new(format!("cannot keep a state: {error}"))
                .hint("the host may have no memory: end a machine, or try again")
        })?;
        Self::new(files.into_iter().map(Arc::new).collect(), runs, images, file)
    }

    /// Returns the files of the memory.
    #[must_use]
    pub fn files(&self) -> &[Arc<OwnedFd>] {
        &self.files
    }

    /// Returns where each page is.
    #[must_use]
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Returns the file of the state.
    #[must_use]
    pub fn state_file(&self) -> &File {
        &self.state
    }

    /// Writes where each page is into a file without a name: first the number of images of disks, and where
    /// these are.
    ///
    /// # Errors
    /// The error of the host.
    pub fn places_file(&self) -> Result<File> {
        let file = File::from(new_file(c"mercury-state", 0, 0)?);
        let images = [(self.images.len() as u64).to_le_bytes().to_vec(), pack(&self.images)].concat();
        file.write_all_at(&[images, pack(&self.runs)].concat(), 0)
            .map_err(|error| Error::file("write", Path::new("memory"), error))?;
        Ok(file)
    }

    /// Takes an image from the files of another process's: the state, the places, and the memory.
    ///
    /// # Errors
    /// As for [`Self::new`].
    pub fn from_files(files: Vec<OwnedFd>) -> Result<Self> {
        let mut files = files.into_iter();
        let (Some(state), Some(places)) = (files.next(), files.next()) else {
            return Err(Error::new("the template has sent no files: this is a bug"));
        };
        let places = read_all(&File::from(places));
        let places = places.map_err(|error| Error::file("read", Path::new("memory"), error))?;
        let (count, places) = places.split_at_checked(8).unwrap_or((&[0; 8], &[]));
        let count = count.try_into().map_or(0, usize::from_le_bytes);
        let mut images = unpack(places);
        let runs = images.split_off(count.min(images.len()));
        Self::new(files.map(Arc::new).collect(), runs, images, state.into())
    }

    /// Reads the state.
    ///
    /// # Errors
    /// The error of the host.
    pub fn state(&self) -> io::Result<Vec<u8>> {
        read_all(&self.state)
    }

    /// Returns the level of a page, and the first page after it that may have another one.
    fn place(&self, page: u64) -> (u8, u64) {
        let index = self.runs.partition_point(|run| run.pages.end <= page);
        match self.runs.get(index) {
            Some(run) if run.pages.start <= page => (run.level, run.pages.end),
            next => (0, next.map_or(u64::MAX / PAGE, |run| run.pages.start)),
        }
    }

    fn check(&self) -> std::result::Result<(), &'static str> {
        let size_of = |file: &Arc<OwnedFd>| file.try_clone().map(File::from)?.metadata().map(|of| of.size());
        let size = self.files.first().and_then(|file| size_of(file).ok()).ok_or("no files")?;
        if !self.files.iter().all(|file| is_sealed(file) && size_of(file).is_ok_and(|other| other == size)) {
            return Err("a file can change");
        }
        let mut from = 0;
        for Run { pages, level } in &self.runs {
            if pages.start < from || pages.end <= pages.start || pages.end > size / PAGE {
                return Err("pages are not in order");
            }
            let is_of_image = |image: &Run| {
                image.level == *level && image.pages.start <= pages.start && pages.end <= image.pages.end
            };
            if usize::from(*level) > self.files.len() && !self.images.iter().any(is_of_image) {
                return Err("a page is in no file");
            }
            from = pages.end;
        }
        Ok(())
    }
}

impl Still for Image {
    fn size(&self) -> u64 {
        let lowest = self.files.first().and_then(|file| file.try_clone().ok());
        lowest.and_then(|file| File::from(file).metadata().ok()).map_or(0, |of| of.size())
    }

    fn read(&self, physical: u64, into: &mut [u8]) -> io::Result<()> {
        let mut at = physical;
        let mut rest = into;
        while !rest.is_empty() {
            let (level, end) = self.place(at / PAGE);
            let length = rest.len().min((end * PAGE - at) as usize);
            let (some, others) = rest.split_at_mut(length);
            match self.files.get(usize::from(level)) {
                Some(file) => read_at(file.as_raw_fd(), at, some)?,
                None => some.fill(0),
            }
            (at, rest) = (at + length as u64, others);
        }
        Ok(())
    }

    fn kind(&self, page: u64) -> Kind {
        match self.images.iter().find(|image| image.pages.contains(&page)) {
            None => Kind::Memory,
            Some(image) if image.level == self.place(page).0 => Kind::Image,
            Some(_) => Kind::Changed,
        }
    }
}

/// Writes places into a file.
///
/// # Errors
/// The error of the host.
pub(crate) fn write_places(file: &File, runs: &[Run]) -> io::Result<()> {
    file.write_all_at(&pack(runs), 0)
}

/// Reads places from a file.
///
/// # Errors
/// The error of the host.
pub(crate) fn read_places(file: &File) -> io::Result<Vec<Run>> {
    read_all(file).map(|bytes| unpack(&bytes))
}

/// Reads a whole file, up to the longest that is believed.
fn read_all(file: &File) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; file.metadata()?.len().min(MOST_BYTES) as usize];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// Writes places as bytes.
fn pack(runs: &[Run]) -> Vec<u8> {
    let mut to = Writer::default();
    for Run { pages, level } in runs {
        to.numbers([pages.start, pages.end, (*level).into()]);
    }
    to.finish()
}

/// Reads places. A level that cannot be is read as one that is too high.
fn unpack(bytes: &[u8]) -> Vec<Run> {
    let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
    let run = |place: &[u8; PLACE]| Run {
        pages: word(&place[..8])..word(&place[8..16]),
        level: u8::try_from(word(&place[16..])).unwrap_or(u8::MAX),
    };
    bytes.as_chunks::<PLACE>().0.iter().map(run).collect()
}

/// A fork that has succeeded.
#[derive(Debug)]
pub struct Forked {
    pub image: Arc<Image>,
    /// The time in which the machine's first process took the instant.
    pub pause: Duration,
}

/// The files that a machine and its template have open.
#[derive(Debug)]
struct Shared {
    state: File,
    places: File,
    /// The [`Words`] of the machine: the size of its balloon, and its throttle.
    words: File,
}

/// The name of the file that begins with a balloon's size, as `/proc` shows it.
pub const BALLOON_FILE: &str = "/memfd:mercury-balloon (deleted)";

/// The template's way to a machine.
#[derive(Debug)]
pub struct Source {
    socket: OwnedFd,
    shared: Arc<Shared>,
    process: i32,
    /// The image from which the machine began.
    image: Arc<Image>,
    /// The files that were the machine's own, in order.
    frozen: Vec<Arc<OwnedFd>>,
    /// The number of the last request.
    request: u64,
}

/// A machine's way to its template.
#[derive(Debug)]
pub struct Link {
    socket: OwnedFd,
    shared: Arc<Shared>,
    /// A file in the machine's folder, for the life of a saved file that is void.
    mark: Option<File>,
    /// The life of the file from which the machine begins.
    origin: Option<Life>,
}

/// A request, as it is sent: the kind, the number, and two values.
type Request = [u64; 4];

/// A request that waits for an answer.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    number: u64,
    pub what: What,
}

/// The machines that are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// All.
    Any,
    /// Those that wait for an interrupt, and have read all keys.
    Idle,
}

/// The things that a template asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The machine as it is, which goes on.
    Freeze,
    /// The machine as it is, which stands still for the file with this life. It is refused while the machine
    /// is at work, if so wanted.
    Hold(Life, Work),
    /// So many pages in the balloon. There is no answer.
    Balloon(u32),
    /// The removal of pages of zeros, from this page on.
    Trim(u64),
}

/// An answer, as it is sent: the kind, the number of the request, the lengths of state and places, the pause,
/// and the number of files below the machine's own.
type Answer = [u64; 6];

/// Both ends of a connection.
#[derive(Debug)]
pub struct Pair {
    socket: OwnedFd,
    link: Link,
}

impl Pair {
    /// Makes a connection.
    ///
    /// # Errors
    /// If the host refuses.
    pub fn new() -> Result<Self> {
        let mut ends = [-1; 2];
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: There is room for two descriptors.
        if unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) } != 0 {
            return Err(Error::system("make a socket for forks"));
        }
        // SAFETY: The descriptors were made above and have no other owner.
        let [socket, other] = ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
        let file = || new_file(c"mercury-state", 0, 0).map(File::from);
        let words = new_file(c"mercury-balloon", size_of::<Words>() as u64, 0)?.into();
        let shared = Arc::new(Shared { state: file()?, places: file()?, words });
        Ok(Self { socket, link: Link { socket: other, shared, mark: None, origin: None } })
    }

    /// Keeps a file for the life of a saved file that is void, and the life of the file from which the
    /// machine begins ([`Link::keep_mark`]).
    pub fn keep_mark(&mut self, mark: File, origin: Option<Life>) {
        self.link.keep_mark(mark, origin);
    }

    /// Keeps the machine's end, in its process.
    #[must_use]
    pub fn into_link(self) -> Link {
        self.link
    }

    /// Keeps the template's end. The machine began from an image in a process of this number.
    #[must_use]
    pub fn into_source(self, process: i32, image: Arc<Image>) -> Source {
        let Self { socket, link: Link { shared, .. } } = self;
        Source { socket, shared, process, image, frozen: Vec::new(), request: 0 }
    }
}

impl Link {
    /// Returns the socket.
    #[must_use]
    pub fn socket(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// Returns all descriptors.
    pub fn descriptors(&self) -> impl Iterator<Item = RawFd> + Clone {
        let Shared { state, places, words } = &*self.shared;
        let files = [state, places, words].map(|file| file.as_raw_fd());
        std::iter::once(self.socket()).chain(files).chain(self.mark.as_ref().map(|file| file.as_raw_fd()))
    }

    /// Keeps a file in the machine's folder for the life of a saved file that is void, and the life of the
    /// file from which the machine begins.
    pub fn keep_mark(&mut self, mark: File, origin: Option<Life>) {
        (self.mark, self.origin) = (Some(mark), origin);
    }

    /// Makes void the file from which the machine begins: it goes on here.
    ///
    /// # Errors
    /// If the mark cannot be written. The file counts then, so the machine must not go on.
    pub fn begin(&self) -> io::Result<()> {
        self.origin.as_ref().map_or(Ok(()), |origin| self.make_void(origin))
    }

    /// Makes the file with this life void.
    fn make_void(&self, life: &Life) -> io::Result<()> {
        // The mark has the length of a life already, so the host needs no memory for it now.
        self.mark.as_ref().map_or(Ok(()), |mark| mark.write_all_at(life, 0))
    }

    /// Makes the file with this life void, however many attempts that takes: the machine and its file would
    /// both go on otherwise. Returns false if the machine is to end before.
    fn insist_on_void(&self, life: &Life, is_over: impl Fn() -> bool) -> bool {
        let mut is_told = false;
        while let Err(error) = self.make_void(life) {
            if is_over() {
                return false;
            }
            if !std::mem::replace(&mut is_told, true) {
                eprintln!(
                    "mercury hosted: the machine stands still, because its folder cannot be written to \
                     ({error}): its saved file would count as well"
                );
            }
            rest();
        }
        true
    }

    /// Returns the words that the machine's template reads and writes, too.
    ///
    /// # Errors
    /// If the host does not map them.
    pub fn words(&self) -> Result<&'static Words> {
        let (length, rights) = (size_of::<Words>(), libc::PROT_READ | libc::PROT_WRITE);
        let file = self.shared.words.as_raw_fd();
        // SAFETY: A new mapping where the host likes.
        let at = unsafe { libc::mmap(ptr::null_mut(), length, rights, libc::MAP_SHARED, file, 0) };
        if at == libc::MAP_FAILED {
            return Err(Error::system("map the size of the balloon and the throttle"));
        }
        // SAFETY: The mapping stays, is as long, and all bytes are valid; all of it is atomic.
        Ok(unsafe { &*at.cast::<Words>() })
    }

    /// Returns the requests of the template that were not answered, in order. Of several for a freeze only
    /// the last one is.
    #[must_use]
    pub fn wanted(&self) -> Vec<Wanted> {
        let mut all: Vec<Wanted> = Vec::new();
        while let Some([kind, number, first, second]) = self.receive() {
            let what = match kind {
                FREEZE => What::Freeze,
                HOLD => What::Hold(life_of([first, second]), Work::Any),
                HOLD_IF_IDLE => What::Hold(life_of([first, second]), Work::Idle),
                BALLOON => What::Balloon(u32::try_from(first).unwrap_or(0)),
                TRIM => What::Trim(first),
                // The template has given up before the machine stood still.
                GO_ON => {
                    all.retain(|one| one.number != first);
                    continue;
                }
                _ => continue,
            };
            if matches!(what, What::Freeze | What::Hold(..)) {
                all.retain(|one| !matches!(one.what, What::Freeze | What::Hold(..)));
            }
            all.push(Wanted { number, what });
        }
        all
    }

    /// Returns the next message. Returns nothing if there is none.
    fn receive(&self) -> Option<Request> {
        self.read().ok().flatten()
    }

    /// Reads a message. Returns nothing at the end.
    fn read(&self) -> io::Result<Option<Request>> {
        let mut request = [0_u8; size_of::<Request>()];
        // SAFETY: There is room for so many bytes.
        let read = unsafe { libc::read(self.socket(), request.as_mut_ptr().cast(), request.len()) };
        match usize::try_from(read) {
            Err(_) => Err(io::Error::last_os_error()),
            Ok(count) if count < request.len() => Ok(None),
            Ok(_) => {
                let mut words = request.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
                Ok(Some(std::array::from_fn(|_| words.next().unwrap_or(0))))
            }
        }
    }

    /// Stands still until the template has decided on a request to hold. Returns true if the machine ends,
    /// because all of it is in a file. Otherwise that file is void, and the machine goes on. It does so at a
    /// later request as well, because the template's word to go on may not have had room. `is_over` says that
    /// the machine is to end for another reason. It then ends here as well if the file cannot be made void.
    #[must_use]
    pub fn await_end(&self, wanted: Wanted, is_over: impl Fn() -> bool) -> bool {
        let ends = loop {
            match self.read() {
                Ok(Some([END, _, number, _])) if number == wanted.number => break true,
                Ok(Some([GO_ON, _, number, _])) if number >= wanted.number => break false,
                Ok(Some([FREEZE | HOLD | HOLD_IF_IDLE, number, ..])) if number > wanted.number => {
                    break false;
                }
                Ok(Some(_)) => {}
                Ok(None) => break false,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if is_over() {
                        break false;
                    }
                    let _ = self.wait();
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break false,
            }
        };
        match wanted.what {
            What::Hold(life, _) if !ends => !self.insist_on_void(&life, is_over),
            _ => ends,
        }
    }

    /// Waits for a message, a signal, or a moment. Returns false if the template has ended.
    pub fn wait(&self) -> bool {
        let mut ready = libc::pollfd { fd: self.socket(), events: libc::POLLIN, revents: 0 };
        // SAFETY: There is one descriptor.
        let count = unsafe { libc::ppoll(&raw mut ready, 1, &raw const REST, ptr::null()) };
        count <= 0 || ready.revents & libc::POLLHUP == 0
    }

    /// Tells the template that pages of zeros were removed: the page from which there may be more, and the
    /// number of pages.
    pub fn trimmed(&self, wanted: Wanted, next: u64, removed: u64) {
        self.answer([TRIMMED, wanted.number, next, removed, 0, 0], None);
    }

    /// Tells the template why the machine cannot be forked.
    pub fn refuse(&self, wanted: Wanted, why: &str) {
        if self.shared.state.write_all_at(why.as_bytes(), 0).is_ok() {
            self.answer([REFUSED, wanted.number, why.len() as u64, 0, 0, 0], None);
        }
    }

    /// Sends the machine. `pause` is the time in which it stood still. If the host has no memory for it, the
    /// template gets the file alone.
    pub fn send(&self, wanted: Wanted, frozen: &Frozen, state: &[u8], pause: Duration) {
        let places = pack(&frozen.runs);
        let Shared { state: state_file, places: places_file, .. } = &*self.shared;
        let written = state_file.write_all_at(state, 0).and_then(|()| places_file.write_all_at(&places, 0));
        let lengths = if written.is_ok() { [state.len(), places.len()] } else { [0; 2] };
        let [state, places] = lengths.map(|length| length as u64);
        // Even without the rest the template must get the file: it is below the machine's own from now on.
        let answer = [FROZEN, wanted.number, state, places, pause.as_nanos() as u64, frozen.below.into()];
        self.answer(answer, Some(frozen.file));
    }

    /// Sends an answer, and perhaps a descriptor. If the template does not read, it gets none.
    fn answer(&self, answer: Answer, file: Option<RawFd>) {
        let bytes = answer.map(u64::to_le_bytes).concat();
        let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        let mut control = Control::default();
        // SAFETY: All zeros are a valid message.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        if let Some(file) = file {
            control.hold(file, &mut message);
        }
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: The message and all that it points to live until the call has returned.
        unsafe { libc::sendmsg(self.socket(), &raw const message, flags) };
    }
}

/// The time between two looks of a machine that stands still.
static REST: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// Waits for a signal, or a moment. The library's function makes a call that is forbidden to machines.
fn rest() {
    // SAFETY: There are no descriptors.
    unsafe { libc::ppoll(ptr::null_mut(), 0, &raw const REST, ptr::null()) };
}

/// Room for a descriptor beside a message.
#[repr(C, align(8))]
#[derive(Default)]
struct Control([u8; CONTROL]);

/// The room, and the part of it that one descriptor takes: a second one would fit into the rest.
// SAFETY: Both compute a number.
const CONTROL: usize = unsafe { libc::CMSG_SPACE(size_of::<RawFd>() as u32) } as usize;
// SAFETY: As above.
const ONE: usize = unsafe { libc::CMSG_LEN(size_of::<RawFd>() as u32) } as usize;

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
            (*header).cmsg_len = ONE;
            libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(file);
        }
    }

    /// Returns the descriptor beside a message that was received.
    fn take(message: &libc::msghdr) -> Option<OwnedFd> {
        // SAFETY: The host has filled the room, and says how much of it. A descriptor has no other owner.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(message);
            if header.is_null() || (*header).cmsg_type != libc::SCM_RIGHTS || (*header).cmsg_len < ONE {
                return None;
            }
            let file = libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned();
            Some(OwnedFd::from_raw_fd(file))
        }
    }
}

impl Source {
    /// Takes the machine as it is now. The machine goes on.
    ///
    /// # Errors
    /// If the machine cannot be forked, or does not answer in time.
    pub fn freeze(&mut self) -> Result<Forked> {
        self.take(FREEZE, [0; 2])
    }

    /// Takes the machine as it is now for a file with this life. The machine stands still until it is told to
    /// [end](Self::end_held) or to [go on](Self::let_go). If this fails, it goes on.
    ///
    /// # Errors
    /// As for [`Self::freeze`].
    pub fn hold(&mut self, life: &Life, work: Work) -> Result<Forked> {
        let kind = if work == Work::Idle { HOLD_IF_IDLE } else { HOLD };
        let taken = self.take(kind, words_of(life));
        taken.inspect_err(|_| self.let_go())
    }

    /// Lets a machine go on that was held.
    pub fn let_go(&self) {
        // A machine that is gone needs no word.
        let _ = self.send([GO_ON, 0, self.request, 0]);
    }

    /// Ends a machine that was held.
    ///
    /// # Errors
    /// If the machine is gone.
    pub fn end_held(&self) -> Result<()> {
        self.send([END, 0, self.request, 0])?;
        // One that was stopped meanwhile would never end.
        // SAFETY: It takes numbers. The process is a child that was not waited for, so the number is its own.
        unsafe { libc::kill(self.process, libc::SIGCONT) };
        Ok(())
    }

    /// Wants so many pages in the machine's balloon.
    ///
    /// # Errors
    /// If the machine is gone.
    pub fn set_balloon(&self, pages: u32) -> Result<()> {
        self.send([BALLOON, 0, pages.into(), 0])
    }

    /// Returns the size of the machine's balloon as it is wanted, and as it is. A program that has taken over
    /// its machine can write anything there.
    #[must_use]
    pub fn balloon(&self) -> (u32, u32) {
        read_balloon(&self.shared.words).unwrap_or_default()
    }

    /// Returns what the machine has of its own, and if it stands still at its limit.
    #[must_use]
    pub fn account(&self) -> Account {
        throttle::read_account(&self.shared.words).unwrap_or_default()
    }

    /// Lets the machine have so many bytes of its own, or as many as it likes. A machine that stands still is
    /// woken if it may go on.
    pub fn limit(&self, limit: Option<u64>) {
        // The file has this length already, so the host needs no memory for it now.
        let _ = throttle::write_limit(&self.shared.words, limit);
        let Account { used, waits } = self.account();
        if waits && limit.is_none_or(|limit| limit >= used) {
            // SAFETY: It takes numbers. The process is a child that was not waited for.
            unsafe { libc::kill(self.process, CALL) };
        }
    }

    /// Begins the account of a machine that has so many bytes of its own.
    pub fn begin_account(&self, used: u64) {
        let _ = throttle::write_used(&self.shared.words, used);
    }

    /// Has the machine remove pages of zeros from its own file, from a page on. Returns the page from which
    /// there may be more, and the number of pages.
    ///
    /// # Errors
    /// If the machine does not answer in time.
    pub fn trim(&mut self, from: u64) -> Result<(u64, u64)> {
        self.ask(TRIM, [from, 0])?;
        match self.hear(Instant::now() + TRIM_PATIENCE)? {
            [TRIMMED, _, next, removed, ..] if next > from => Ok((next, removed.min(next - from))),
            _ => Err(no_answer("it has not looked for pages of zeros")),
        }
    }

    fn take(&mut self, kind: u64, values: [u64; 2]) -> Result<Forked> {
        let deadline = Instant::now() + PATIENCE;
        self.ask(kind, values)?;
        let [kind, _, state, places, pause, below] = self.hear(deadline)?;
        if kind == REFUSED {
            let mut why = vec![0; state.min(1000) as usize];
            let read = self.shared.state.read_exact_at(&mut why, 0);
            read.map_err(|error| no_answer(&error.to_string()))?;
            let why = String::from_utf8_lossy(&why).into_owned();
            return Err(Error::new(why).hint("the machine goes on, and others can be forked"));
        }
        self.frozen.iter().try_for_each(|file| await_seal(file, deadline + PATIENCE, self.process))?;
        let (state, runs) = self.copy(state, places).map_err(|error| no_answer(&error.to_string()))?;
        let files: Vec<Arc<OwnedFd>> = self.image.files.iter().chain(&self.frozen).cloned().collect();
        if files.len() as u64 != below {
            return Err(no_answer("an earlier answer was lost"));
        }
        let image = Image::new(files, runs, self.image.images.clone(), state)?;
        let image = if image.files.len() > MOST_FILES { flatten(image)? } else { image };
        Ok(Forked { image: Arc::new(image), pause: Duration::from_nanos(pause) })
    }

    /// Sends a request that has an answer. A machine that is stopped is not asked: it would not answer.
    fn ask(&mut self, kind: u64, [first, second]: [u64; 2]) -> Result<()> {
        if is_stopped(self.process) {
            return Err(stopped(self.process));
        }
        self.request += 1;
        self.send([kind, self.request, first, second])
    }

    /// Sends a message.
    fn send(&self, request: Request) -> Result<()> {
        let request = request.map(u64::to_le_bytes).concat();
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: There are so many bytes.
        let sent =
            unsafe { libc::send(self.socket.as_raw_fd(), request.as_ptr().cast(), request.len(), flags) };
        if sent < 0 {
            return Err(no_answer(&io::Error::last_os_error().to_string()));
        }
        // SAFETY: It takes numbers. The process is a child that was not waited for, so the number is its own.
        unsafe { libc::kill(self.process, CALL) };
        Ok(())
    }

    /// Waits for the answer to the last request. An earlier one may come late: then its file is kept, because
    /// it is below the machine's own.
    fn hear(&mut self, deadline: Instant) -> Result<Answer> {
        loop {
            let rest = deadline.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return Err(no_answer("it is silent"));
            }
            let wait = rest.min(SILENCE).as_millis().max(1) as i32;
            let mut ready = libc::pollfd { fd: self.socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: There is one descriptor.
            let count = unsafe { libc::poll(&raw mut ready, 1, wait) };
            if count <= 0 {
                refuse_if_stopped(self.process)?;
                continue;
            }
            let (answer, file) = self.receive().map_err(|error| no_answer(&error.to_string()))?;
            let [kind, request, ..] = answer;
            if kind == FROZEN {
                let file = file.filter(|_| self.frozen.len() < MOST_FORKS);
                let file = file.ok_or_else(|| no_answer("it has sent no memory"))?;
                self.frozen.push(Arc::new(file));
            }
            if request == self.request {
                return Ok(answer);
            }
        }
    }

    /// Receives a message, which is there.
    fn receive(&self) -> io::Result<(Answer, Option<OwnedFd>)> {
        let mut bytes = [0; size_of::<Answer>()];
        let mut control = Control::default();
        let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        // SAFETY: All zeros are a valid message.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        (message.msg_control, message.msg_controllen) = (control.0.as_mut_ptr().cast(), ONE);
        let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
        // SAFETY: The message and all that it points to live until the call has returned.
        let received = unsafe { libc::recvmsg(self.socket.as_raw_fd(), &raw mut message, flags) };
        if received < 0 {
            return Err(io::Error::last_os_error());
        }
        let file = Control::take(&message);
        if received as usize != bytes.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
        Ok((std::array::from_fn(|_| words.next().unwrap_or(0)), file))
    }

    /// Copies the state into a file of its own, and reads the places.
    fn copy(&self, state: u64, places: u64) -> io::Result<(File, Vec<Run>)> {
        if state == 0 || state.max(places) > MOST_BYTES || !places.is_multiple_of(PLACE as u64) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let Shared { state: from, places: list, .. } = &*self.shared;
        let copy = File::from(new_file(c"mercury-state", 0, 0).map_err(|_| io::Error::last_os_error())?);
        let mut from: &File = from;
        from.rewind()?;
        // The library copies from file to file: nothing of the state stays in this process, of which all
        // other machines are copies.
        if io::copy(&mut io::Read::take(from, state), &mut &copy)? != state {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut bytes = vec![0; places as usize];
        list.read_exact_at(&mut bytes, 0)?;
        from.set_len(0)?;
        list.set_len(0)?;
        Ok((copy, unpack(&bytes)))
    }
}

/// Returns the two words of a life.
fn words_of(life: &Life) -> [u64; 2] {
    let mut words = life.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
    std::array::from_fn(|_| words.next().unwrap_or(0))
}

/// Returns the life of two words.
fn life_of(words: [u64; 2]) -> Life {
    words.map(u64::to_le_bytes).concat().try_into().unwrap_or_default()
}

/// Reads the size of a balloon, as it is wanted and as it is.
///
/// # Errors
/// If the file is no balloon's.
pub fn read_balloon(file: &File) -> io::Result<(u32, u32)> {
    let mut bytes = [0; size_of::<Size>()];
    file.read_exact_at(&mut bytes, 0)?;
    let mut words = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
    let mut next = || words.next().unwrap_or(0);
    Ok((next(), next()))
}

fn no_answer(why: &str) -> Error {
    Error::new(format!("the machine does not answer ({why})"))
        .hint("`mercury disco list` shows if it runs; the host may be overloaded: try again")
}

/// Seals a file when all processes of the machine, of which this is the first, have followed.
fn await_seal(file: &OwnedFd, deadline: Instant, process: i32) -> Result<()> {
    let mut look = Instant::now() + SILENCE;
    while !is_sealed(file) {
        let now = Instant::now();
        match seal(file) {
            Err(error) if now > deadline => return Err(error),
            Err(_) if now > look => {
                refuse_if_stopped(process)?;
                look = now + SILENCE;
            }
            Err(_) => thread::sleep(MOMENT),
            Ok(()) => {}
        }
    }
    Ok(())
}

/// Checks that no process of a machine is stopped. They are the first one and those below it.
fn refuse_if_stopped(first: i32) -> Result<()> {
    let all = processes();
    let mut own = vec![first];
    let mut at = 0;
    while let Some(&process) = own.get(at) {
        if all.iter().any(|one| one.number == process && one.is_stopped) {
            return Err(stopped(process));
        }
        let below = all.iter().filter(|one| one.parent == process && !own.contains(&one.number));
        let below: Vec<i32> = below.map(|one| one.number).collect();
        own.extend(below);
        at += 1;
    }
    Ok(())
}

/// Returns true if a person or a debugger has stopped a process.
fn is_stopped(process: i32) -> bool {
    Process::read(process).is_some_and(|process| process.is_stopped)
}

/// A process of the host, as `proc_pid_stat(5)` shows it.
struct Process {
    number: i32,
    parent: i32,
    is_stopped: bool,
}

impl Process {
    fn read(number: i32) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
        // The name before may contain anything but ends with the last parenthesis.
        let mut fields = stat.rsplit(')').next()?.split_whitespace();
        let is_stopped = matches!(fields.next()?, "T" | "t");
        Some(Self { number, parent: fields.next()?.parse().ok()?, is_stopped })
    }
}

/// Returns all processes of the host.
fn processes() -> Vec<Process> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| Process::read(entry.file_name().to_str()?.parse().ok()?)).collect()
}

fn stopped(process: i32) -> Error {
    Error::new(format!("the machine does not answer (its process {process} is stopped)"))
        .hint(format!("`kill -CONT {process}` lets it go on"))
}

/// Makes one file of all but the lowest.
fn flatten(image: Image) -> Result<Image> {
    let wrong = |error: io::Error| {
        Error::new(format!("cannot copy a machine's memory: {error}"))
            .hint("the host may have no memory left")
    };
    let flat = File::from(new_file(c"mercury-hosted", image.size(), libc::MFD_ALLOW_SEALING)?);
    let mut piece = vec![0; PIECE];
    let mut runs = Vec::new();
    for Run { pages, level } in &image.runs {
        let Some(from) = image.files.get(usize::from(*level)) else {
            let is_image = image.images.iter().any(|image| image.level == *level);
            runs.push(Run { pages: pages.clone(), level: if is_image { *level } else { 2 } });
            continue;
        };
        let (mut at, end) = (pages.start * PAGE, pages.end * PAGE);
        while at < end {
            let piece = &mut piece[..PIECE.min((end - at) as usize)];
            read_at(from.as_raw_fd(), at, piece)
                .and_then(|()| flat.write_all_at(piece, at))
                .map_err(wrong)?;
            at += piece.len() as u64;
        }
        runs.push(Run { pages: pages.clone(), level: 1 });
    }
    // The copies of other machines have a copy of this process's memory.
    piece.fill(0);
    std::hint::black_box(&piece);
    let flat = OwnedFd::from(flat);
    seal(&flat)?;
    Image::new(vec![Arc::clone(&image.files[0]), Arc::new(flat)], runs, image.images, image.state)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const PAGES: u64 = 40;

    fn file(word: u64) -> OwnedFd {
        let file = File::from(new_file(c"test", PAGES * PAGE, libc::MFD_ALLOW_SEALING).unwrap());
        (0..PAGES).for_each(|page| file.write_all_at(&(page + word).to_le_bytes(), page * PAGE).unwrap());
        file.into()
    }

    fn sealed(word: u64) -> OwnedFd {
        let file = file(word);
        seal(&file).unwrap();
        file
    }

    fn run(start: u64, end: u64, level: u8) -> Run {
        Run { pages: start..end, level }
    }

    fn image(runs: Vec<Run>) -> Result<Image> {
        Image::with_state(vec![sealed(0), sealed(1000)], runs, vec![], b"first")
    }

    fn word(image: &Image, page: u64) -> u64 {
        let mut word = [0; 8];
        image.read(page * PAGE, &mut word).unwrap();
        u64::from_le_bytes(word)
    }

    /// Reads across the ends of runs.
    #[test]
    fn an_image_is_read_from_all_of_its_files() {
        let image = image(vec![run(2, 5, 1), run(5, 6, 2), run(7, 8, 1)]).unwrap();
        assert_eq!((image.size(), image.state().unwrap()), (PAGES * PAGE, b"first".to_vec()));
        let mut all = vec![0; (PAGES * PAGE) as usize];
        image.read(0, &mut all).unwrap();
        for page in 0..PAGES {
            let expected = match page {
                2..5 | 7 => 1000 + page,
                5 => 0,
                _ => page,
            };
            let at = (page * PAGE) as usize;
            assert_eq!(u64::from_le_bytes(all[at..at + 8].try_into().unwrap()), expected, "{page}");
            assert_eq!(word(&image, page), expected);
        }
        assert!(image.read((PAGES - 1) * PAGE, &mut all[..2 * PAGE as usize]).is_err(), "beyond the end");
    }

    #[test]
    fn wrong_places_and_files_are_refused() {
        assert!(image(vec![run(2, 5, 1), run(5, PAGES, 2)]).is_ok());
        for runs in [
            vec![run(2, 5, 1), run(4, 7, 2)],
            vec![run(2, 5, 3)],
            vec![run(2, 2, 1)],
            vec![run(5, 2, 1)],
            vec![run(2, PAGES + 1, 1)],
            vec![run(2, u64::MAX, 1)],
        ] {
            assert!(image(runs.clone()).is_err(), "{runs:?}");
        }
        assert!(Image::with_state(vec![sealed(0), file(1)], vec![], vec![], b"").is_err(), "it can change");
        let short = new_file(c"test", PAGE, libc::MFD_ALLOW_SEALING).unwrap();
        seal(&short).unwrap();
        assert!(Image::with_state(vec![sealed(0), short], vec![], vec![], b"").is_err(), "it is short");
        assert!(Image::with_state(vec![], vec![], vec![], b"").is_err());
    }

    /// Pages of an image of a disk that a machine has not changed are not read, and those that it has changed
    /// are kept even if they are zero.
    #[test]
    fn images_of_disks_are_places_of_their_own() {
        const LEVEL: u8 = crate::memory::disks::LEVEL;
        let images = || vec![run(10, 20, LEVEL), run(30, 35, LEVEL + 1)];
        let of = |runs: Vec<Run>| Image::with_state(vec![sealed(0), sealed(1000)], runs, images(), b"s");
        let image =
            of(vec![run(2, 5, 1), run(10, 12, LEVEL), run(12, 13, 1), run(31, 35, LEVEL + 1)]).unwrap();
        let kinds = [2, 10, 12, 13, 30, 31, 36].map(|page| image.kind(page));
        let expected = [Kind::Memory, Kind::Image, Kind::Changed, Kind::Changed];
        assert_eq!(kinds, [&expected[..], &[Kind::Changed, Kind::Image, Kind::Memory]].concat()[..]);
        assert_eq!([10, 12, 13].map(|page| word(&image, page)), [0, 1012, 13]);
        let same = |image: &Image, other: &Image| {
            (0..PAGES).for_each(|page| {
                assert_eq!((image.kind(page), word(image, page)), (other.kind(page), word(other, page)));
            });
        };
        let mut files = vec![OwnedFd::from(image.state_file().try_clone().unwrap())];
        files.push(image.places_file().unwrap().into());
        files.extend(image.files().iter().map(|file| file.try_clone().unwrap()));
        same(&image, &Image::from_files(files).unwrap());
        let before = of(image.runs.clone()).unwrap();
        same(&image, &flatten(before).unwrap());
        // A machine can take no other pages of an image, and none of another one.
        for wrong in [run(9, 11, LEVEL), run(19, 21, LEVEL), run(10, 11, LEVEL + 1), run(10, 11, LEVEL + 2)] {
            assert!(of(vec![wrong]).is_err());
        }
    }

    /// Calls a function for the next request.
    fn answer(link: &Link, how: impl FnOnce(Wanted)) {
        loop {
            match link.wanted()[..] {
                [wanted] => return how(wanted),
                _ if link.is_gone() => return,
                _ => thread::sleep(MOMENT),
            }
        }
    }

    impl Link {
        fn is_gone(&self) -> bool {
            let mut ready = libc::pollfd { fd: self.socket(), events: libc::POLLRDHUP, revents: 0 };
            // SAFETY: There is one descriptor.
            unsafe { libc::poll(&raw mut ready, 1, 0) > 0 && ready.revents & libc::POLLHUP != 0 }
        }
    }

    fn connect(machine: impl FnOnce(Link) + Send + 'static) -> (Source, thread::JoinHandle<()>) {
        let Pair { socket, link } = Pair::new().unwrap();
        let shared = Arc::clone(&link.shared);
        let image = Arc::new(image(vec![]).unwrap());
        let process = std::process::id().cast_signed();
        let source = Source { socket, shared, process, image, frozen: Vec::new(), request: 0 };
        (source, thread::spawn(move || machine(link)))
    }

    /// Stands for a machine that is forked again and again.
    #[test]
    fn a_template_gets_what_a_machine_sends() {
        let (mut source, machine) = connect(|link| {
            let own = [file(2000), file(3000)];
            let frozen = |at: usize, runs| Frozen { file: own[at].as_raw_fd(), runs, below: 3 + at as u8 };
            let short = Duration::from_micros(9);
            let first = frozen(0, vec![run(2, 5, 2), run(35, 40, 3)]);
            answer(&link, |wanted| link.send(wanted, &first, b"state", short));
            answer(&link, |wanted| link.refuse(wanted, "not now"));
            // A late answer to an earlier request brings its file, and nothing else.
            let many = (0..PAGES / 2).map(|page| run(2 * page, 2 * page + 1, 3)).collect();
            answer(&link, |wanted| {
                link.refuse(Wanted { number: wanted.number - 1, ..wanted }, "late");
                link.send(wanted, &frozen(1, many), b"other", short);
            });
        });
        let Forked { image, pause } = source.freeze().unwrap();
        assert_eq!((pause, image.state().unwrap()), (Duration::from_micros(9), b"state".to_vec()));
        assert_eq!([1, 2, 4, 5, 36].map(|page| word(&image, page)), [1, 2002, 2004, 5, 0]);
        let own = File::from(image.files[2].try_clone().unwrap());
        assert!(own.write_at(b"x", 0).is_err(), "it is sealed");
        assert!(source.freeze().unwrap_err().message().contains("not now"));
        let Forked { image, .. } = source.freeze().unwrap();
        assert_eq!([2, 3, 4].map(|page| word(&image, page)), [3002, 3, 3004]);
        assert_eq!((image.files.len(), image.state().unwrap()), (4, b"other".to_vec()));
        machine.join().unwrap();
        assert!(source.freeze().unwrap_err().message().contains("does not answer"), "it has ended");
    }

    /// A machine that stands still ends if it is told so. Otherwise the file is void, whatever has happened.
    #[test]
    fn a_held_machine_ends_or_its_file_is_void() {
        const LIVES: [Life; 4] = [[1; 16], [2; 16], [3; 16], [4; 16]];
        let mark = tempfile::tempfile().unwrap();
        let reader = mark.try_clone().unwrap();
        let void = move || {
            let mut life = [0; 16];
            reader.read_exact_at(&mut life, 0).map(|()| life).ok()
        };
        let (mut source, machine) = connect(|mut link| {
            link.keep_mark(mark, Some(LIVES[0]));
            link.begin().unwrap();
            let own = file(2000);
            let mut ends = Vec::new();
            for below in 3..6 {
                let frozen = Frozen { file: own.as_raw_fd(), runs: vec![], below };
                answer(&link, |wanted| {
                    link.send(wanted, &frozen, b"state", Duration::ZERO);
                    ends.push(link.await_end(wanted, || false));
                });
            }
            assert_eq!(ends, [false, true, false]);
        });
        source.hold(&LIVES[1], Work::Any).unwrap();
        assert_eq!(void(), Some(LIVES[0]), "it began from this file");
        source.let_go();
        source.hold(&LIVES[2], Work::Any).unwrap();
        assert_eq!(void(), Some(LIVES[1]), "it has gone on");
        source.end_held().unwrap();
        source.hold(&LIVES[3], Work::Any).unwrap();
        assert_eq!(void(), Some(LIVES[1]), "it has ended");
        drop(source);
        machine.join().unwrap();
        assert_eq!(void(), Some(LIVES[3]), "its template has ended");
    }

    /// The host refuses the mark: the file counts, and only one of both may go on.
    #[test]
    fn a_machine_whose_file_cannot_be_void_does_not_go_on() {
        const LIFE: Life = [1; 16];
        let kept = tempfile::NamedTempFile::new().unwrap();
        let mark = File::open(kept.path()).unwrap();
        let (mut source, machine) = connect(|mut link| {
            link.keep_mark(mark, Some(LIFE));
            assert!(link.begin().is_err(), "it must not begin");
            let own = file(2000);
            let frozen = Frozen { file: own.as_raw_fd(), runs: vec![], below: 3 };
            answer(&link, |wanted| {
                link.send(wanted, &frozen, b"state", Duration::ZERO);
                let told = Instant::now() + Duration::from_millis(300);
                assert!(link.await_end(wanted, || Instant::now() > told), "it has gone on");
                assert!(Instant::now() > told, "it has ended by itself");
            });
        });
        source.hold(&[2; 16], Work::Any).unwrap();
        source.let_go();
        machine.join().unwrap();
        assert_eq!(std::fs::read(kept.path()).unwrap(), b"");
    }

    /// The word to go on had no room: a machine that stands still goes on at the next word.
    #[test]
    fn a_held_machine_goes_on_at_a_later_request() {
        let words: [fn(&mut Source); 2] = [
            |source| source.ask(HOLD, [1, 2]).unwrap(),
            |source| {
                source.request += 1;
                source.let_go();
            },
        ];
        for word in words {
            let (mut source, machine) = connect(|link| {
                let own = file(2000);
                let frozen = Frozen { file: own.as_raw_fd(), runs: vec![], below: 3 };
                answer(&link, |wanted| {
                    link.send(wanted, &frozen, b"state", Duration::ZERO);
                    let late = Instant::now() + PATIENCE;
                    assert!(!link.await_end(wanted, || Instant::now() > late));
                    assert!(Instant::now() < late, "it has heard nothing");
                });
            });
            source.hold(&[1; 16], Work::Any).unwrap();
            word(&mut source);
            machine.join().unwrap();
        }
    }

    /// A template that has given up is not waited for.
    #[test]
    fn requests_come_in_order_and_the_last_freeze_counts() {
        let (mut source, machine) = connect(|link| {
            while !link.is_gone() {
                thread::sleep(MOMENT);
            }
            let what: Vec<What> = link.wanted().into_iter().map(|one| one.what).collect();
            assert_eq!(what, [What::Balloon(7), What::Trim(3), What::Freeze]);
        });
        source.ask(HOLD, [1, 2]).unwrap();
        source.set_balloon(7).unwrap();
        source.ask(TRIM, [3, 0]).unwrap();
        source.ask(FREEZE, [0; 2]).unwrap();
        source.ask(HOLD, [1, 2]).unwrap();
        source.let_go();
        source.ask(FREEZE, [0; 2]).unwrap();
        drop(source);
        machine.join().unwrap();
    }

    /// A process and its child, which end with this value. They are no children of this process: other tests
    /// look at those.
    struct Processes([i32; 2]);

    impl Processes {
        fn start() -> Self {
            let script = "sh -c 'sleep 60 & wait' > /dev/null 2>&1 & echo $!";
            let output = std::process::Command::new("sh").args(["-c", script]).output().unwrap();
            let parent = String::from_utf8(output.stdout).unwrap().trim().parse().unwrap();
            loop {
                if let Some(child) = processes().iter().find(|one| one.parent == parent) {
                    return Self([parent, child.number]);
                }
                thread::sleep(MOMENT);
            }
        }

        fn signal(&self, which: usize, signal: i32) {
            // SAFETY: It takes numbers.
            unsafe { libc::kill(self.0[which], signal) };
        }

        fn stop(&self, which: usize) {
            self.signal(which, libc::SIGSTOP);
            while !is_stopped(self.0[which]) {
                thread::sleep(MOMENT);
            }
        }
    }

    impl Drop for Processes {
        fn drop(&mut self) {
            [1, 0].into_iter().for_each(|which| self.signal(which, libc::SIGKILL));
        }
    }

    /// Other requests wait while the template waits for a machine.
    #[test]
    fn a_machine_that_is_stopped_is_not_waited_for() {
        let processes = Processes::start();
        processes.stop(0);
        let (mut source, machine) = connect(|link| {
            while !link.is_gone() {
                thread::sleep(MOMENT);
            }
            let what: Vec<What> = link.wanted().into_iter().map(|one| one.what).collect();
            assert!(what.is_empty(), "it would answer when it goes on: {what:?}");
        });
        source.process = processes.0[0];
        let begin = Instant::now();
        let requests: [fn(&mut Source) -> Result<()>; 3] = [
            |source| source.freeze().map(drop),
            |source| source.hold(&[1; 16], Work::Idle).map(drop),
            |source| source.trim(0).map(drop),
        ];
        for request in requests {
            let error = request(&mut source).unwrap_err();
            assert!(error.message().contains("is stopped"), "{}", error.message());
            assert!(error.remedy().is_some_and(|hint| hint.contains("kill -CONT")));
        }
        assert!(begin.elapsed() < PATIENCE / 2);
        drop(source);
        machine.join().unwrap();
    }

    /// The first process answers, and another one of the machine does not follow. One that is slow to remove
    /// pages of zeros holds up nobody for long, either.
    #[test]
    fn a_process_of_a_machine_that_is_stopped_is_not_waited_for() {
        let processes = Processes::start();
        processes.stop(1);
        let (mut source, machine) = connect(|link| {
            let own = file(2000);
            let frozen = Frozen { file: own.as_raw_fd(), runs: vec![], below: 3 };
            let (length, rights) = ((PAGES * PAGE) as usize, libc::PROT_READ | libc::PROT_WRITE);
            let descriptor = own.as_raw_fd();
            // SAFETY: A new mapping where the host likes. It stands for that of the other process.
            let at = unsafe { libc::mmap(ptr::null_mut(), length, rights, libc::MAP_SHARED, descriptor, 0) };
            assert_ne!(at, libc::MAP_FAILED);
            answer(&link, |wanted| link.send(wanted, &frozen, b"state", Duration::ZERO));
            while !link.is_gone() {
                thread::sleep(MOMENT);
            }
            // SAFETY: The mapping was made above.
            unsafe { libc::munmap(at, length) };
        });
        source.process = processes.0[0];
        let begin = Instant::now();
        let error = source.freeze().unwrap_err();
        assert!(error.message().contains(&format!("process {} is stopped", processes.0[1])));
        assert!(begin.elapsed() < PATIENCE / 2);
        processes.signal(1, libc::SIGCONT);
        let begin = Instant::now();
        assert!(source.trim(0).is_err());
        assert!(begin.elapsed() < PATIENCE / 2);
        drop(source);
        machine.join().unwrap();
    }

    /// Stands for a program that has taken over its machine.
    #[test]
    fn lies_are_refused_in_time() {
        let begin = Instant::now();
        let (mut source, machine) = connect(|link| {
            let own = file(2000);
            let lie = |answer: Answer, file| link.answer(answer, file);
            answer(&link, |Wanted { number, .. }| lie([FROZEN, number, 5, 24, 0, 2], None));
            answer(&link, |Wanted { number, .. }| lie([REFUSED, number, u64::MAX, 0, 0, 0], None));
            answer(&link, |Wanted { number, .. }| lie([7, number, 1 << 60, 1 << 60, 0, 0], None));
            for (at, runs) in [vec![run(0, 1 << 50, 2)], vec![run(0, 1, 200)], vec![]].into_iter().enumerate()
            {
                // At last one file more than it has sent.
                let below = 3 + at as u8 + u8::from(at == 2);
                let frozen = Frozen { file: own.as_raw_fd(), runs, below };
                answer(&link, |wanted| link.send(wanted, &frozen, b"state", Duration::ZERO));
            }
            answer(&link, |_| ());
            // Answers to other requests, without an end.
            answer(&link, |_| {
                while !link.is_gone() {
                    lie([REFUSED, u64::MAX, 0, 0, 0, 0], None)
                }
            });
        });
        for number in 0..8 {
            assert!(source.freeze().is_err(), "{number}");
        }
        assert!(begin.elapsed() < 4 * PATIENCE);
        drop(source);
        machine.join().unwrap();
    }

    #[test]
    fn many_files_become_two() {
        let files = Vec::from([0, 1000, 2000, 3000].map(sealed));
        let runs = vec![run(0, 3, 2), run(5, 9, 1), run(9, 12, 3), run(20, 30, 4)];
        let before = Image::with_state(files, runs, vec![], b"state").unwrap();
        let words: Vec<u64> = (0..PAGES).map(|page| word(&before, page)).collect();
        let after = flatten(before).unwrap();
        assert_eq!((after.files.len(), after.state().unwrap()), (2, b"state".to_vec()));
        (0..PAGES).for_each(|page| assert_eq!(word(&after, page), words[page as usize], "{page}"));
        assert!(after.runs.iter().any(|one| *one == run(20, 30, 2)), "{:?}", after.runs);
    }
}
