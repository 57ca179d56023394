//! A machine as a file: `mercury hosted save` and `restore`.
//!
//! Numbers are little-endian. The file is [`MAGIC`], the version and the length of the state (8 bytes each),
//! the [`Life`], the state, then runs of memory: the first page's number, the number of pages (8 bytes each),
//! the pages.
//! Pages that are in no run are zero, or as in the image of a disk in memory. A run of no pages ends them.
//! The last 32 bytes are BLAKE3 of all before, so a file that was cut short or changed in any bit is refused
//! before anything of it is used.
//!
//! The state is the facts about the host, then the processor, then the devices
//! ([`mercury_devices::state`]).

use std::{
    arch::x86_64::_rdtsc,
    fs::File,
    io::{self, BufReader, Read, Seek, Write},
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use mercury_devices::state::{Reader, Writer};

use crate::{
    cpuid,
    error::{Error, Result},
    layout::PAGE,
    memory::Memory,
    run::Isolation,
};

const MAGIC: &[u8; 8] = b"MHOSTED\n";
const VERSION: u64 = 5;
const SEAL: usize = blake3::OUT_LEN;
/// The number of bytes before the state.
const HEAD: usize = 24 + size_of::<Life>();
/// The largest state that is believed, in bytes.
const STATE_AT_MOST: u64 = 1 << 20;
/// The number of pages that are looked at together.
const PIECE: u64 = 256;
/// The clock's frequency is measured, and differs by as much from one measurement to the next.
const CLOCK_TOLERANCE: u64 = 1000;
/// The leaves of CPUID by which a kernel chooses its code and its registers' sizes.
const LEAVES: [(u32, u32); 12] = [
    (0, 0),
    (1, 0),
    (7, 0),
    (0xD, 0),
    (0xD, 1),
    (0xD, 2),
    (0xD, 5),
    (0xD, 6),
    (0xD, 7),
    (0x8000_0001, 0),
    (0x8000_0007, 0),
    (0x8000_0008, 0),
];

/// A random number by which a machine is known from its start or restore until it ends. Of two files with
/// the same number, the later has all that the machine did; a machine with the number of a file goes on.
pub type Life = [u8; 16];

/// The head of a saved machine.
#[derive(Clone, Copy, Debug)]
pub struct Head([u8; HEAD]);

impl Head {
    /// Reads the head from where a machine begins.
    ///
    /// # Errors
    /// If there are fewer bytes.
    pub fn read(from: &mut impl Read) -> io::Result<Self> {
        let mut head = [0; HEAD];
        from.read_exact(&mut head).map(|()| Self(head))
    }

    /// Returns the life of the machine that wrote it.
    #[must_use]
    pub fn life(&self) -> Life {
        self.0[24..].try_into().unwrap_or_default()
    }

    fn number(&self, at: usize) -> u64 {
        self.0[at..at + 8].try_into().map_or(0, u64::from_le_bytes)
    }

    fn is_saved_machine(&self) -> bool {
        self.0[..8] == MAGIC[..]
    }

    fn version(&self) -> u64 {
        self.number(8)
    }

    fn state_length(&self) -> u64 {
        self.number(16)
    }
}

/// The facts that a saved machine and the one that takes its state must have in common.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    pub memory: u64,
    pub isolation: Isolation,
    /// True if each address space has a process.
    pub per_space: bool,
    /// The hash of the code for slots. It stands for the kernel, and for this program.
    pub code: [u8; 32],
    pub clock_khz: u64,
}

impl Facts {
    /// Writes the facts, and those about the host.
    pub fn save(&self, to: &mut Writer) {
        to.number(self.memory);
        to.numbers([self.isolation == Isolation::Process, self.per_space]);
        to.bytes(&self.code);
        to.numbers([self.clock_khz, now()]);
        for (leaf, subleaf) in LEAVES {
            to.numbers(cpuid::guest(leaf, subleaf, 0));
        }
    }

    /// Compares saved facts with these.
    ///
    /// # Errors
    /// The first difference, by its name.
    pub fn compare(&self, from: &mut Reader<'_>) -> Result<()> {
        let memory: u64 = from.number()?;
        if memory != self.memory {
            return Err(Error::new(format!("the saved machine has {} MiB of memory", memory >> 20))
                .hint(format!("restore it with --memory {}", memory >> 20)));
        }
        let (is_isolated, is_per_space) = (from.truth()?, from.truth()?);
        if is_isolated != (self.isolation == Isolation::Process) {
            let name = if is_isolated { "process" } else { "none" };
            return Err(Error::new("the saved machine has another isolation")
                .hint(format!("restore it with --isolation={name}")));
        }
        if is_per_space != self.per_space {
            return Err(Error::new(
                "the saved machine has another number of processors, or a debugger, or the host \
                 had no room for its processes",
            )
            .hint("restore it with the same --cpus, without --gdb, and end other machines for room"));
        }
        if from.bytes()? != self.code {
            return Err(Error::new(
                "the saved machine has another kernel, or was saved by another version of this \
                 program",
            )
            .hint("restore it with the vmlinux and the version that it had"));
        }
        self.compare_clock(from.number()?, from.number()?)?;
        for (leaf, subleaf) in LEAVES {
            let mut saved = [0_u32; 4];
            for word in &mut saved {
                *word = from.number()?;
            }
            if saved != cpuid::guest(leaf, subleaf, 0) {
                return Err(Error::host(format!(
                    "this host's processor has other features than the one on which the machine was saved \
                     (CPUID, leaf {leaf:#x})"
                )));
            }
        }
        Ok(())
    }

    fn compare_clock(&self, khz: u64, ticks: u64) -> Result<()> {
        if khz.abs_diff(self.clock_khz) > khz / CLOCK_TOLERANCE {
            return Err(Error::host(format!(
                "this host's time stamp counter has {} kHz, and the saved machine's {khz}",
                self.clock_khz
            )));
        }
        if now() < ticks {
            return Err(Error::host(
                "this host's time stamp counter is behind the saved machine's, whose time would go back",
            )
            .hint("restore it on the host that has saved it, before that host restarts"));
        }
        Ok(())
    }
}

fn now() -> u64 {
    // SAFETY: Reading it is allowed, or the C library would not work.
    unsafe { _rdtsc() }
}

/// The kinds of pages of a machine that stands still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Memory,
    /// It is as it is in the image of a disk.
    Image,
    /// It is on a disk, and the machine has written to it.
    Changed,
}

/// The memory of a machine that stands still.
pub trait Still {
    /// Returns the size in bytes.
    fn size(&self) -> u64;

    /// Reads from a physical address on.
    ///
    /// # Errors
    /// The error of the host.
    fn read(&self, physical: u64, into: &mut [u8]) -> io::Result<()>;

    /// Returns the kind of a page.
    fn kind(&self, page: u64) -> Kind;
}

impl Still for Memory {
    fn size(&self) -> u64 {
        Self::size(self)
    }

    fn read(&self, physical: u64, into: &mut [u8]) -> io::Result<()> {
        self.read_file(physical, into)
    }

    fn kind(&self, page: u64) -> Kind {
        Self::kind(self, page)
    }
}

/// Writes a machine, and the seal over it.
///
/// # Errors
/// If the reader of it is gone, or the memory cannot be read.
pub fn write(to: impl Write, life: &Life, state: &[u8], memory: &impl Still) -> io::Result<()> {
    let mut sealed = Sealed { to, hash: blake3::Hasher::new() };
    sealed.write_all(MAGIC)?;
    sealed.write_all(&VERSION.to_le_bytes())?;
    sealed.write_all(&(state.len() as u64).to_le_bytes())?;
    sealed.write_all(life)?;
    sealed.write_all(state)?;
    let mut piece = vec![0; (PIECE * PAGE) as usize];
    let pages = memory.size() / PAGE;
    for first in (0..pages).step_by(PIECE as usize) {
        let count = PIECE.min(pages - first) as usize;
        let piece = &mut piece[..count * PAGE as usize];
        memory.read(first * PAGE, piece)?;
        write_runs(&mut sealed, first, piece, memory)?;
    }
    sealed.write_all(&[0; 16])?;
    let seal = sealed.hash.finalize();
    sealed.to.write_all(seal.as_bytes())?;
    sealed.to.flush()
}

/// Writes the pages of a piece that are not zero, and those that the machine has changed on disks.
fn write_runs(to: &mut impl Write, first: u64, piece: &[u8], memory: &impl Still) -> io::Result<()> {
    let pages = piece.chunks_exact(PAGE as usize).zip(first..);
    let is_kept = |(page, number): (&[u8], u64)| match memory.kind(number) {
        Kind::Memory => page.iter().any(|byte| *byte != 0),
        Kind::Image => false,
        Kind::Changed => true,
    };
    let kept: Vec<bool> = pages.map(is_kept).collect();
    let mut at = 0;
    while at < kept.len() {
        let skipped = kept[at..].iter().take_while(|kept| !**kept).count();
        let count = kept[at + skipped..].iter().take_while(|kept| **kept).count();
        at += skipped;
        if count > 0 {
            to.write_all(&(first + at as u64).to_le_bytes())?;
            to.write_all(&(count as u64).to_le_bytes())?;
            to.write_all(&piece[at * PAGE as usize..(at + count) * PAGE as usize])?;
        }
        at += count;
    }
    Ok(())
}

/// Copies a saved machine, which comes from a connection that stays open, to its end. The head has been read.
///
/// # Errors
/// If the connection ends before, or the copy cannot be written.
pub fn copy(head: &Head, from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
    to.write_all(&head.0)?;
    let mut length = head.state_length();
    loop {
        if io::copy(&mut from.by_ref().take(length), to)? < length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut run = [0; 16];
        from.read_exact(&mut run)?;
        to.write_all(&run)?;
        let count = run[8..].try_into().map_or(0, u64::from_le_bytes);
        if count == 0 {
            break;
        }
        length = count.saturating_mul(PAGE);
    }
    let mut seal = [0; SEAL];
    from.read_exact(&mut seal)?;
    to.write_all(&seal)
}

struct Sealed<W> {
    to: W,
    hash: blake3::Hasher,
}

impl<W: Write> Write for Sealed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.to.write(bytes)?;
        self.hash.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// A saved machine whose seal is whole.
#[derive(Debug)]
pub struct Saved {
    path: PathBuf,
    file: File,
    pub life: Life,
    pub state: Vec<u8>,
}

impl Saved {
    /// Opens a file, and checks all of it.
    ///
    /// # Errors
    /// If it cannot be read, is none, or is not whole.
    pub fn open(path: &Path) -> Result<Self> {
        let wrong = |error| Error::file("read", path, error);
        let file = File::open(path).map_err(wrong)?;
        let length = file.metadata().map_err(wrong)?.len();
        let damaged = || {
            Error::new(format!("{} is damaged: it is not as it was written", path.display()))
                .hint("copy it again from where it was saved")
        };
        let mut head = Head([0; HEAD]);
        file.read_exact_at(&mut head.0, 0).map_err(|_| damaged())?;
        if !head.is_saved_machine() {
            return Err(Error::new(format!("{} is no saved machine", path.display()))
                .hint("name a file that `mercury hosted save` has written"));
        }
        if !is_sealed(&file, length).map_err(wrong)? {
            return Err(damaged());
        }
        if head.version() != VERSION {
            return Err(Error::new(format!("{} has the format {}", path.display(), head.version()))
                .hint("restore it with the version of this program that has saved it"));
        }
        let mut state = vec![0; head.state_length().min(STATE_AT_MOST) as usize];
        file.read_exact_at(&mut state, HEAD as u64).map_err(|_| damaged())?;
        Ok(Self { path: path.to_owned(), file, life: head.life(), state })
    }

    /// Puts the saved memory into the guest's, which must be zero. Returns the pages of disks that were put
    /// there, in order.
    ///
    /// # Errors
    /// If the file is not what its seal has said, or has more memory.
    pub fn fill(&self, memory: &Memory) -> Result<Vec<Range<u64>>> {
        let mut changed = Vec::new();
        let mut put = |first: u64, bytes: &[u8]| {
            let end = first.checked_add(bytes.len() as u64 / PAGE)?;
            memory.write(first.checked_mul(PAGE)?, bytes)?;
            if end > memory.ram() / PAGE {
                changed.push(first..end);
            }
            Some(())
        };
        self.runs(|first, bytes| Ok(put(first, bytes)))?;
        Ok(changed)
    }

    /// Gives a function the runs of memory, in their order: the first page's number, and the pages. All other
    /// pages are zero.
    ///
    /// # Errors
    /// If the file cannot be read or is not what its seal has said, or the function fails or returns nothing:
    /// the machine has no such memory.
    pub fn runs(&self, mut give: impl FnMut(u64, &[u8]) -> Result<Option<()>>) -> Result<()> {
        let wrong = || {
            Error::new(format!("{} has memory that the machine does not have", self.path.display()))
                .hint("give it the memory and the disks that it had, `,private` ones as they were")
        };
        let unread = |error: io::Error| match error.kind() {
            io::ErrorKind::UnexpectedEof => wrong(),
            _ => Error::file("read", &self.path, error),
        };
        let mut at = (HEAD + self.state.len()) as u64;
        let mut piece = vec![0; (PIECE * PAGE) as usize];
        loop {
            let mut head = [0; 16];
            self.file.read_exact_at(&mut head, at).map_err(unread)?;
            let [first, count] = [0, 8].map(|at| head[at..at + 8].try_into().map_or(0, u64::from_le_bytes));
            at += 16;
            if count == 0 {
                return Ok(());
            }
            let bytes = piece.get_mut(..(count.min(PIECE + 1) * PAGE) as usize).ok_or_else(wrong)?;
            self.file.read_exact_at(bytes, at).map_err(unread)?;
            give(first, bytes)?.ok_or_else(wrong)?;
            at += count * PAGE;
        }
    }
}

/// Returns the life of the machine in a file that is whole, of whatever version, and nothing for other files.
///
/// # Errors
/// If the file cannot be read.
pub fn life_if_whole(mut file: &File) -> io::Result<Option<Life>> {
    let length = file.metadata()?.len();
    if length < (HEAD + SEAL) as u64 || !is_sealed(file, length)? {
        return Ok(None);
    }
    file.rewind()?;
    Head::read(&mut file).map(|head| head.is_saved_machine().then(|| head.life()))
}

fn is_sealed(file: &File, length: u64) -> io::Result<bool> {
    let Some(before) = length.checked_sub(SEAL as u64) else { return Ok(false) };
    let mut seal = [0; SEAL];
    file.read_exact_at(&mut seal, before)?;
    let mut hash = blake3::Hasher::new();
    io::copy(&mut BufReader::with_capacity(1 << 20, file.take(before)), &mut hash)?;
    Ok(hash.finalize() == seal)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::testing::with_memory;

    fn facts() -> Facts {
        Facts {
            memory: 1 << 30,
            isolation: Isolation::None,
            per_space: true,
            code: [7; 32],
            clock_khz: 2_000_000,
        }
    }

    #[test]
    fn facts_that_differ_are_named() {
        let mut writer = Writer::default();
        facts().save(&mut writer);
        let bytes = writer.finish();
        let compare = |other: Facts| other.compare(&mut Reader::new(&bytes));
        compare(facts()).unwrap();
        compare(Facts { clock_khz: 2_001_000, ..facts() }).unwrap();
        for (other, word) in [
            (Facts { memory: 2 << 30, ..facts() }, "1024 MiB"),
            (Facts { isolation: Isolation::Process, ..facts() }, "isolation"),
            (Facts { per_space: false, ..facts() }, "processors"),
            (Facts { code: [8; 32], ..facts() }, "another kernel"),
            (Facts { clock_khz: 2_100_000, ..facts() }, "2100000 kHz"),
        ] {
            let error = compare(other).unwrap_err();
            assert!(error.message().contains(word), "{word}: {error}");
        }
        let mut changed = bytes.clone();
        // The seventh number of eight bytes after the hash is in a leaf of CPUID.
        let at = bytes.len() - 8;
        changed[at] ^= 1;
        assert!(facts().compare(&mut Reader::new(&changed)).unwrap_err().message().contains("CPUID"));
        assert!(facts().compare_clock(2_000_000, u64::MAX).unwrap_err().message().contains("behind"));
    }

    /// A machine of four pages: memory that is zero, a page of an image, two that it has changed.
    struct Disk;

    impl Still for Disk {
        fn size(&self) -> u64 {
            4 * PAGE
        }

        fn read(&self, physical: u64, into: &mut [u8]) -> io::Result<()> {
            let at = (3 * PAGE - physical) as usize;
            into.fill(0);
            into[at] = 7;
            Ok(())
        }

        fn kind(&self, page: u64) -> Kind {
            [Kind::Memory, Kind::Image, Kind::Changed, Kind::Changed][page as usize]
        }
    }

    /// A page that was zeroed on a disk once would have come back as the image has it.
    #[test]
    fn changed_pages_of_disks_are_kept_even_if_they_are_zero() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("saved");
        write(File::create(&path).unwrap(), &[9; 16], b"state", &Disk).unwrap();
        let saved = Saved::open(&path).unwrap();
        with_memory(|memory| {
            memory.write(0, &[1; 4 * PAGE as usize]).unwrap();
            saved.fill(memory).unwrap();
            let mut back = [1; 4 * PAGE as usize];
            memory.read(0, &mut back).unwrap();
            let sums =
                back.chunks_exact(PAGE as usize).map(|page| page.iter().map(|byte| u64::from(*byte)).sum());
            assert_eq!(sums.collect::<Vec<u64>>(), [PAGE, PAGE, 0, 7]);
            memory.clear(0, 4 * PAGE).unwrap();
        });
    }

    #[test]
    fn memory_comes_back_and_any_damage_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("saved");
        with_memory(|memory| {
            memory.write(5 * PAGE, &[1; 3 * PAGE as usize]).unwrap();
            memory.write(9 * PAGE + 1, &[2]).unwrap();
            write(File::create(&path).unwrap(), &[9; 16], b"state", memory).unwrap();
            memory.clear(5 * PAGE, 5 * PAGE).unwrap();
            let saved = Saved::open(&path).unwrap();
            assert_eq!((saved.life, &*saved.state), ([9; 16], &b"state"[..]));
            saved.fill(memory).unwrap();
            let mut back = vec![0; 6 * PAGE as usize];
            memory.read(4 * PAGE, &mut back).unwrap();
            assert_eq!(back.iter().map(|byte| u64::from(*byte)).sum::<u64>(), 3 * PAGE + 2);
            assert_eq!(
                (back[PAGE as usize - 1], back[PAGE as usize], back[5 * PAGE as usize + 1]),
                (0, 1, 2)
            );
            memory.clear(5 * PAGE, 5 * PAGE).unwrap();
        });
        let whole = std::fs::read(&path).unwrap();
        for at in (0..whole.len()).step_by(97).chain([whole.len() - 1]) {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x10;
            std::fs::write(&path, damaged).unwrap();
            assert!(Saved::open(&path).is_err(), "{at}");
        }
        for length in [0, 7, 24, 100, whole.len() - 1] {
            std::fs::write(&path, &whole[..length]).unwrap();
            assert!(Saved::open(&path).is_err(), "{length}");
        }
    }
}
