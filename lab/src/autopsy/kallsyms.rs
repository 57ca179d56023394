//! The table of symbols that a kernel has in its own memory, for /proc/kallsyms.
//!
//! Names are compressed: each byte of a name is the number of a token. The 256 tokens follow each other,
//! each with a NUL at its end. The digits stand for themselves, and so the table of tokens is found. In
//! front of it lie the offsets of every 256th name, the names, and their number. Linux 6.1 has the
//! addresses in front of all of that, and an index of the names right in front of the tokens. 6.12 has both
//! at the end. An address is relative to the kernel's base, which this start of the kernel has moved.

use std::ops::Range;

use super::dump::{bytes_at, u16_at, u32_at, u64_at};

/// The tokens of the digits.
const DIGITS: &[u8] = b"0\x001\x002\x003\x004\x005\x006\x007\x008\x009\0";
/// The longest token.
const TOKEN_MAX: u64 = 128;
/// Bytes of 256 names at most.
const TAIL_MAX: u64 = 32 << 10;
/// Names between two markers.
const MARKED: u64 = 256;
/// The most names of a kernel, and the bytes of an entry of the index.
const NAMES_MAX: u64 = 1 << 20;
const INDEXED: u64 = 3;
/// Kernels lie at multiples of this in physical memory, and are smaller than the second number.
const ALIGNMENT: u64 = 2 << 20;
const KERNEL_MAX: u64 = 128 << 20;
/// The addresses of kernels.
const KERNELS: u64 = 0xffff_ffff_8000_0000;
const BANNER: &[u8] = b"Linux version ";

/// The symbols of a kernel that is in memory.
#[derive(Debug)]
pub struct Symbols {
    /// Ascending by address. The type is `nm`'s.
    all: Vec<(u64, u8, String)>,
    /// The kernel's code.
    code: Range<u64>,
    /// A virtual address of the kernel's image, less its physical address.
    delta: u64,
}

impl Symbols {
    /// Finds the symbols of all kernels in a machine's memory.
    pub fn find_all(memory: &[u8]) -> Vec<Self> {
        let digits = memchr::memmem::find_iter(memory, DIGITS);
        digits.filter_map(|at| Self::parse(memory, at as u64)).collect()
    }

    fn parse(memory: &[u8], digits: u64) -> Option<Self> {
        let tokens = Tokens::before(memory, digits)?;
        let markers = Markers::before(memory, tokens.start)?;
        let (names, count) = names_before(memory, &markers)?;
        let (base, offsets) = addresses(memory, names, count, tokens.end)?;
        let mut all = Vec::new();
        let mut at = names;
        for number in 0..count {
            let (name, next) = name_at(memory, at)?;
            at = next;
            let mut text: Vec<u8> = Vec::new();
            name.iter().for_each(|&byte| text.extend_from_slice(tokens.all[usize::from(byte)]));
            let Some((&kind, text)) = text.split_first() else { continue };
            let offset = u32_at(memory, offsets + 4 * number)?.cast_signed();
            // Symbols of a CPU's own memory are absolute.
            let address = match u64::try_from(offset) {
                Ok(absolute) => absolute,
                Err(_) => base.wrapping_sub(1).wrapping_add_signed(-i64::from(offset)),
            };
            all.push((address, kind, String::from_utf8_lossy(text).into_owned()));
        }
        all.sort();
        let mut symbols = Self { all, code: 0..0, delta: 0 };
        symbols.code = symbols.address_of("_stext")?..symbols.address_of("_etext")?;
        symbols.delta = base.wrapping_sub(symbols.physical_base(memory, base, tokens.start)?);
        Some(symbols)
    }

    /// Finds where the image begins, by the place of the kernel's banner in it.
    fn physical_base(&self, memory: &[u8], base: u64, table: u64) -> Option<u64> {
        let banner = self.address_of("linux_banner")? - base;
        let last = table / ALIGNMENT * ALIGNMENT;
        let places = (0..KERNEL_MAX / ALIGNMENT).map_while(|number| last.checked_sub(number * ALIGNMENT));
        places.into_iter().find(|place| bytes_at(memory, place + banner, BANNER.len()) == Some(BANNER))
    }

    pub fn address_of(&self, name: &str) -> Option<u64> {
        self.all.iter().find(|(_, _, other)| other == name).map(|(address, _, _)| *address)
    }

    /// Returns the physical address of something in the kernel's image.
    pub fn physical(&self, virt: u64) -> u64 {
        virt.wrapping_sub(self.delta)
    }

    /// Returns true if there is code of the kernel at this address.
    pub fn is_code(&self, address: u64) -> bool {
        self.code.contains(&address)
    }

    /// Returns the name of the code at this address.
    pub fn name_of(&self, address: u64) -> String {
        let before = self.all.partition_point(|(other, _, _)| *other <= address);
        let code = self.all[..before].iter().rev().find(|(_, kind, _)| b"tTwW".contains(kind));
        code.map_or_else(
            || format!("{address:#x}"),
            |(start, _, name)| format!("{name}+{:#x}", address - start),
        )
    }
}

/// The table of tokens.
struct Tokens<'a> {
    start: u64,
    /// The end of the index, which follows the tokens.
    end: u64,
    all: Vec<&'a [u8]>,
}

impl<'a> Tokens<'a> {
    /// Finds the table in which the digits stand here. The index after the table says if it is one.
    fn before(memory: &'a [u8], digits: u64) -> Option<Self> {
        let mut first_end = digits.checked_sub(1)?;
        for _ in 0..u64::from(b'0') - 1 {
            first_end = (0..TOKEN_MAX)
                .filter_map(|back| first_end.checked_sub(1 + back))
                .find(|at| bytes_at(memory, *at, 1) == Some(&[0]))?;
        }
        (0..TOKEN_MAX / 8).find_map(|back| Self::at(memory, (first_end / 8 * 8).checked_sub(back * 8)?))
    }

    fn at(memory: &'a [u8], start: u64) -> Option<Self> {
        let (mut all, mut at, mut offsets) = (Vec::new(), start, Vec::new());
        for _ in 0..256 {
            let from = memory.get(usize::try_from(at).ok()?..)?;
            let length = memchr::memchr(0, from).filter(|length| (*length as u64) < TOKEN_MAX)?;
            offsets.push(u16::try_from(at - start).ok()?);
            all.push(&from[..length]);
            at += length as u64 + 1;
        }
        let index = at.next_multiple_of(8);
        let is_index =
            (0..256).all(|number| u16_at(memory, index + 2 * number) == Some(offsets[number as usize]));
        is_index.then_some(Self { start, end: index + 512, all })
    }
}

/// The offsets of every 256th name.
struct Markers {
    start: u64,
    count: u64,
    second: u64,
    last: u64,
}

impl Markers {
    /// Finds the markers in front of the tokens. Between the two may lie an index of the names, of three
    /// bytes each.
    fn before(memory: &[u8], tokens: u64) -> Option<Self> {
        let most = (NAMES_MAX * INDEXED).min(tokens);
        (0..most / 8).map(|back| back * 8).find_map(|index| {
            let end = tokens - index;
            match index {
                // The number of names is not known without an index.
                0 => (2..NAMES_MAX / MARKED).find_map(|count| Self::at(memory, end, count)),
                _ => Self::at(memory, end, (index / INDEXED).div_ceil(MARKED)),
            }
        })
    }

    /// Returns the markers that end here, if there are so many.
    fn at(memory: &[u8], end: u64, count: u64) -> Option<Self> {
        let start = end.checked_sub((4 * count).next_multiple_of(8))?;
        let marker = |number| u32_at(memory, start + 4 * number).map(u64::from);
        if count < 2 || marker(0) != Some(0) {
            return None;
        }
        let (second, last) = (marker(1)?, marker(count - 1)?);
        let ascend = (1..count).all(|number| marker(number - 1) < marker(number));
        ascend.then_some(Self { start, count, second, last })
    }
}

/// Returns a compressed name, and the place of the next one.
fn name_at(memory: &[u8], at: u64) -> Option<(&[u8], u64)> {
    let byte = |at| Some(u64::from(bytes_at(memory, at, 1)?[0]));
    let (mut length, mut start) = (byte(at)?, at + 1);
    if length & 0x80 != 0 {
        length = (length & 0x7f) | byte(start)? << 7;
        start += 1;
    }
    Some((bytes_at(memory, start, usize::try_from(length).ok()?)?, start + length))
}

/// Finds the names in front of the markers, and their number, which is in front of the names.
fn names_before(memory: &[u8], markers: &Markers) -> Option<(u64, u64)> {
    let latest = markers.start.checked_sub(markers.last)? / 8 * 8;
    let counts = (markers.count - 1) * MARKED + 1..=markers.count * MARKED;
    (0..TAIL_MAX / 8).find_map(|back| {
        let names = latest.checked_sub(back * 8)?;
        let count = u64_at(memory, names.checked_sub(8)?).filter(|count| counts.contains(count))?;
        let mut at = names;
        for _ in 0..MARKED {
            (_, at) = name_at(memory, at)?;
        }
        (at == names + markers.second).then_some((names, count))
    })
}

/// Returns the kernel's base, and the place of the offsets from it.
fn addresses(memory: &[u8], names: u64, count: u64, after_tokens: u64) -> Option<(u64, u64)> {
    let size = (4 * count).next_multiple_of(8);
    let places = [
        names.checked_sub(16).and_then(|base| Some((base, base.checked_sub(size)?))),
        Some((after_tokens + size, after_tokens)),
    ];
    places.into_iter().flatten().find_map(|(place, offsets)| {
        let base = u64_at(memory, place).filter(|base| *base >= KERNELS && base % 4096 == 0)?;
        Some((base, offsets))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub mod tests {
    use super::*;

    const BASE: u64 = 0xffff_ffff_a200_0000;

    fn pad(memory: &mut Vec<u8>) {
        memory.resize(memory.len().next_multiple_of(8), 0);
    }

    /// Writes a kernel with 300 symbols, in the order of Linux 6.1 or of later ones, at 4 MiB.
    fn kernel(is_later: bool) -> Vec<u8> {
        let mut memory = vec![0; 4 << 20];
        memory.extend(b"Linux version 6");
        pad(&mut memory);
        let names: Vec<String> = (0..300)
            .map(|number| match number {
                0 => "Dlinux_banner".into(),
                1 => "T_stext".into(),
                298 => format!("T{}", "long".repeat(50)),
                299 => "T_etext".into(),
                _ => format!("tfunction_{number}"),
            })
            .collect();
        let offsets = |memory: &mut Vec<u8>| {
            (0..300).for_each(|number: i32| memory.extend((-1 - number * 16).to_le_bytes()));
            pad(memory);
            memory.extend(BASE.to_le_bytes());
        };
        if !is_later {
            offsets(&mut memory);
        }
        memory.extend(300u64.to_le_bytes());
        let start = memory.len();
        let mut markers = Vec::new();
        for (number, name) in names.iter().enumerate() {
            if number % 256 == 0 {
                markers.extend(u32::try_from(memory.len() - start).unwrap().to_le_bytes());
            }
            // Token 1 is a word.
            let packed: Vec<u8> = name.replace("function", "\x01").into_bytes();
            // A length of more than seven bits has the rest in a second byte.
            if packed.len() < 0x80 {
                memory.push(packed.len().try_into().unwrap());
            } else {
                memory.push((packed.len() & 0x7f | 0x80).try_into().unwrap());
                memory.push((packed.len() >> 7).try_into().unwrap());
            }
            memory.extend(packed);
        }
        pad(&mut memory);
        memory.extend(markers);
        pad(&mut memory);
        if !is_later {
            (0..300u32).for_each(|number| memory.extend(&(0x01_0101 + number).to_be_bytes()[1..]));
            pad(&mut memory);
        }
        let (start, mut index) = (memory.len(), Vec::new());
        for number in 0..=255u8 {
            index.extend(u16::try_from(memory.len() - start).unwrap().to_le_bytes());
            match number {
                1 => memory.extend(b"function"),
                b' '..=b'~' => memory.push(number),
                _ => memory.extend(b"x_"),
            }
            memory.push(0);
        }
        pad(&mut memory);
        memory.extend(index);
        if is_later {
            offsets(&mut memory);
        }
        memory.extend([0; 64]);
        memory
    }

    #[test]
    fn symbols_of_both_layouts_are_found() {
        for is_later in [false, true] {
            let memory = kernel(is_later);
            let all = Symbols::find_all(&memory);
            assert_eq!(all.len(), 1, "later {is_later}");
            let symbols = &all[0];
            assert_eq!(symbols.address_of("_stext"), Some(BASE + 16));
            assert_eq!(symbols.name_of(BASE + 16 * 7 + 3), "function_7+0x3");
            assert_eq!(symbols.address_of(&"long".repeat(50)), Some(BASE + 16 * 298));
            assert_eq!(symbols.physical(BASE + 16), (4 << 20) + 16);
            assert!(symbols.is_code(BASE + 100) && !symbols.is_code(BASE + 16 * 299));
        }
    }

    #[test]
    fn damaged_tables_have_no_symbols() {
        let memory = kernel(false);
        let digits = memchr::memmem::find(&memory, DIGITS).unwrap();
        let index = memory.len() - 64 - 512;
        let mut damaged = memory.clone();
        damaged[index + 100] ^= 1;
        assert!(Symbols::find_all(&damaged).is_empty());
        assert!(Symbols::find_all(&memory[..digits + 20]).is_empty());
    }
}
