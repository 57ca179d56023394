//! An image that is opened, and loaded into the guest's memory. Nothing in it is trusted: each frame must
//! lie in memory of the machine, and the image must be whole before a processor begins.

use crate::acpi::Firmware;
use mercury_abi::{code::Code, restart::SavedCpu};
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use mercury_devices::memory::{self, View};
use mercury_image::{Chunk, Identity, Machine, PAGE, Reader, Source};
use std::{
    fs::File,
    io::{BufReader, Read},
    mem::offset_of,
    path::Path,
};

/// What to do about an image that makes no sense.
const CHECK: &str = "check the image with `mercury inspect`";
const BUFFER: usize = 1 << 20;
/// Largest size of the firmware's memory in all.
const FIRMWARE_MAX: u64 = 64 << 20;
/// Length of the seed in a processor's saved registers.
const SEED: usize = 32;

#[derive(Debug)]
pub struct Image<R = BufReader<File>> {
    reader: Reader<R>,
}

impl Image {
    /// Opens an image in a file or on a block device.
    ///
    /// # Errors
    /// The file cannot be read, or is no image.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|error| {
            Error::new(Exit::Failed, format!("cannot open the image {}: {error}", path.display()))
                .hint("give the file or the block device that `mercury checkpoint` wrote")
        })?;
        Self::read(BufReader::with_capacity(BUFFER, file))
    }
}

impl<R: Read> Image<R> {
    /// Reads the description of the machine.
    ///
    /// # Errors
    /// It is no image.
    pub fn read(from: R) -> Result<Self> {
        Ok(Self { reader: Reader::open(from).map_err(wrong)? })
    }

    /// Returns the description of the machine.
    #[must_use]
    pub fn machine(&self) -> &Machine {
        self.reader.machine()
    }

    /// Returns the image's identity.
    #[must_use]
    pub fn identity(&self) -> Identity {
        self.reader.identity()
    }

    /// Loads the machine's memory. On success the image was whole, and each frame had its place.
    ///
    /// # Errors
    /// The image is damaged or torn, or a frame lies outside of the machine's memory.
    pub fn load(&mut self, view: &View) -> Result<()> {
        while let Some(chunk) = self.reader.next_chunk().map_err(wrong)? {
            put(&chunk, view)?;
        }
        if self.reader.commit().is_none() {
            return Err(Error::new(Exit::Failed, "the image is torn: its end is missing").hint(CHECK));
        }
        Ok(())
    }
}

/// Returns the firmware's memory of a machine.
///
/// # Errors
/// The description has none, or it is damaged.
pub fn firmware(machine: &Machine) -> Result<Firmware> {
    if machine.firmware_memory.is_empty() {
        let why = match machine.firmware_unread.as_str() {
            "" => "an earlier Mercury made it",
            why => why,
        };
        let text = format!(
            "the machine cannot be a guest: its description lacks the memory of the firmware ({why})"
        );
        return Err(Error::coded(Code::GuestFirmware, text)
            .hint("make the checkpoint again with this release, or install it on the machine that moves"));
    }
    let all = machine.firmware_memory.iter().map(|one| one.length).fold(0, u64::saturating_add);
    if all > FIRMWARE_MAX {
        return Err(Error::new(Exit::Failed, "the description is damaged: its firmware has too much memory")
            .hint(CHECK));
    }
    let ranges = machine.firmware_memory.iter();
    let ranges = ranges.map(|one| Ok((one.start_phys, one.content().map_err(wrong)?)));
    Ok(Firmware::new(ranges.collect::<Result<_>>()?))
}

/// Puts the firmware's memory into its places. The machine's own frames come after it.
///
/// # Errors
/// A range is not in the guest's memory.
pub fn load_firmware(firmware: &Firmware, view: &View) -> Result<()> {
    let mut ranges = firmware.ranges().iter();
    ranges.try_for_each(|(start, bytes)| memory::write(view, *start, bytes).ok_or_else(|| outside(*start)))
}

/// Gives each processor random numbers of its own: two guests from one image must not share theirs.
///
/// # Errors
/// The host gives none, or a processor's registers are not in the guest's memory.
pub fn sow_seeds(machine: &Machine, view: &View) -> Result<()> {
    machine.cpus.iter().try_for_each(|cpu| sow(view, cpu.saved_phys))
}

/// Puts the frames of a record into their places.
fn put(chunk: &Chunk, view: &View) -> Result<()> {
    let mut pages = chunk.data.chunks_exact(PAGE);
    let mut copy = [0; PAGE];
    for frame in &chunk.frames {
        let written = match frame.source {
            Source::Data => pages.next().and_then(|page| memory::write(view, frame.phys, page)),
            Source::Zero if is_fresh(view, frame.phys) => Some(()),
            Source::Zero => memory::write(view, frame.phys, &[0; PAGE]),
            Source::Frame(from) => {
                memory::read(view, from, &mut copy).and_then(|()| memory::write(view, frame.phys, &copy))
            }
            Source::Parent(_) => None,
        };
        written.ok_or_else(|| outside(frame.phys))?;
    }
    Ok(())
}

/// Returns true if a page of the guest is still as the host gives it. In low memory the firmware may have
/// left something.
fn is_fresh(view: &View, phys: u64) -> bool {
    const LOW: u64 = 1 << 20;
    phys >= LOW && memory::contains(view, phys, PAGE as u64)
}

fn sow(view: &View, saved_phys: u64) -> Result<()> {
    let mut seed = [0_u8; SEED];
    // SAFETY: The buffer has this length.
    let got = unsafe { libc::getrandom(seed.as_mut_ptr().cast(), SEED, 0) };
    if got != SEED as isize {
        return Err(Error::new(Exit::Failed, "the host gives no random numbers")
            .hint("let the monitor call getrandom(2): a filter of system calls forbids it"));
    }
    let place = saved_phys + offset_of!(SavedCpu, seed) as u64;
    memory::write(view, place, &seed).ok_or_else(|| outside(place))
}

fn outside(phys: u64) -> Error {
    Error::new(Exit::Failed, format!("the image is damaged: its frame at {phys:#x} is not in its memory"))
        .hint(CHECK)
}

fn wrong(error: mercury_image::Error) -> Error {
    Error::new(Exit::Failed, error.to_string()).hint(CHECK)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use super::*;
    use crate::layout::Layout;
    use mercury_image::{Cpu, FirmwareMemory, Frame, Kind, Part, Range, Writer};

    pub fn machine() -> Machine {
        let range = |start_phys| Range { start_phys, pages: 16, kind: Kind::Kept };
        Machine {
            ranges: vec![range(0x1000), range(0x10_0000)],
            cpus: vec![Cpu { cpu: 0, apic_id: 0, saved_phys: 0x10_2000 }],
            firmware_memory: vec![FirmwareMemory::new(0x1000, &[9; 4 * PAGE]).unwrap()],
            ..Machine::default()
        }
    }

    pub fn image(machine: &Machine, frames: Vec<Frame>, data: Vec<u8>) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut writer = Writer::begin(&mut bytes, Identity([1; 16]), machine).unwrap();
        let part = Part::Frames(Chunk { frames, data });
        writer.add(&part.compress(1).unwrap()).unwrap();
        writer.commit().unwrap();
        bytes
    }

    fn load(bytes: &[u8]) -> Result<View> {
        let mut image = Image::read(bytes)?;
        let view = crate::memory::map(&Layout::of(image.machine())?)?;
        load_firmware(&firmware(image.machine())?, &view)?;
        image.load(&view)?;
        sow_seeds(image.machine(), &view).map(|()| view)
    }

    fn frame(phys: u64, source: Source) -> Frame {
        Frame { phys, source }
    }

    pub fn frames() -> Vec<Frame> {
        vec![
            frame(0x10_0000, Source::Data),
            frame(0x10_1000, Source::Frame(0x10_0000)),
            frame(0x2000, Source::Zero),
            frame(0x3000, Source::Data),
            frame(0x10_2000, Source::Zero),
        ]
    }

    #[test]
    fn frames_come_to_their_places_over_the_firmware_s_memory() {
        let data = [[1; PAGE], [2; PAGE]].concat();
        let view = load(&image(&machine(), frames(), data)).unwrap();
        let page = |phys| {
            let mut bytes = [0; PAGE];
            memory::read(&view, phys, &mut bytes).unwrap();
            bytes
        };
        assert_eq!([0x10_0000, 0x10_1000, 0x1000, 0x2000, 0x3000].map(|phys| page(phys)[7]), [1, 1, 9, 0, 2]);
        let saved = page(0x10_2000);
        let seed = offset_of!(SavedCpu, seed);
        assert!(saved[seed..seed + SEED].iter().any(|byte| *byte != 0));
        assert!(saved[..seed].iter().chain(&saved[seed + SEED..]).all(|byte| *byte == 0));
    }

    #[test]
    fn frames_outside_of_memory_and_torn_images_are_refused() {
        let data = vec![1; PAGE];
        let refused = |bytes: &[u8]| load(bytes).unwrap_err().message;
        for one in [frame(0x20_0000, Source::Data), frame(0x10_3000, Source::Frame(0x50_0000))] {
            let data = if one.source == Source::Data { data.clone() } else { Vec::new() };
            let text = refused(&image(&machine(), vec![one], data));
            assert!(text.contains("is not in its memory") || text.contains("damaged"), "{text}");
        }
        let whole = image(&machine(), vec![frame(0x10_0000, Source::Data)], data);
        for cut in [1, 40, 200] {
            refused(&whole[..whole.len() - cut]);
        }
    }

    #[test]
    fn an_image_without_the_firmware_s_memory_is_refused_with_the_reason() {
        let refused = |why: &str| {
            let machine =
                Machine { firmware_memory: Vec::new(), firmware_unread: why.to_owned(), ..machine() };
            load(&image(&machine, vec![frame(0x10_0000, Source::Zero)], Vec::new())).unwrap_err()
        };
        assert!(refused("").message.contains("an earlier Mercury"));
        assert!(refused("lockdown").message.contains("(lockdown)"));
        assert_eq!(refused("").exit, Exit::Impossible);
    }
}
