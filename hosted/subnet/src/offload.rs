//! Work that a sender leaves to others: checksums, and the division of a long TCP segment. The fields are
//! those of virtio's network header (virtio 1.2, 5.1.6). If the receiver's driver does not want them, the
//! functions of this module do the work.

/// A bit of the flags: the checksum is to be completed.
const NEEDS_CHECKSUM: u8 = 1;
/// The kinds of segments: none, TCP by IPv4, TCP by IPv6.
const WHOLE: u8 = 0;
const TCP4: u8 = 1;
const TCP6: u8 = 4;
/// The offset of TCP's checksum in its header, and of UDP's.
const TCP_CHECKSUM: u16 = 16;
const UDP_CHECKSUM: u16 = 6;
/// The size of Ethernet's header, in bytes.
const ETHERNET: usize = 14;
/// The longest headers that are copied into each part, in bytes.
const LONGEST_HEADERS: usize = 256;
/// The shortest segments that a division may have. Linux sends none with less than 48 bytes, of which its
/// options may take 40.
const LEAST: u16 = 8;

/// The work on a frame that is left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offload {
    flags: u8,
    kind: u8,
    /// Length of the headers.
    header: u16,
    /// Length of the segments.
    segment: u16,
    /// The first byte that the checksum is about.
    start: u16,
    /// The place of the checksum after that.
    offset: u16,
}

/// The work that a driver takes over from its device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accepted {
    pub checksums: bool,
    pub tcp4: bool,
    pub tcp6: bool,
}

impl Offload {
    /// Size of the fields, in bytes.
    pub const SIZE: usize = 10;

    /// Reads the fields as virtio has them.
    #[must_use]
    pub fn from_bytes([flags, kind, a, b, c, d, e, f, g, h]: [u8; Self::SIZE]) -> Self {
        let [header, segment, start, offset] = [[a, b], [c, d], [e, f], [g, h]].map(u16::from_le_bytes);
        Self { flags, kind, header, segment, start, offset }
    }

    /// Returns the fields as virtio has them.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        let mut bytes = [self.flags, self.kind, 0, 0, 0, 0, 0, 0, 0, 0];
        let numbers = [self.header, self.segment, self.start, self.offset];
        for (at, number) in numbers.into_iter().enumerate() {
            bytes[2 + 2 * at..4 + 2 * at].copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    /// Checks the fields of a frame of this length. Fields without a meaning become zeros. Returns `None`
    /// if a place is outside of the frame, or a kind is unknown.
    #[must_use]
    pub fn checked(self, length: usize) -> Option<Self> {
        if self.flags & NEEDS_CHECKSUM == 0 {
            return (self.kind == WHOLE).then(Self::default);
        }
        let (start, offset) = (usize::from(self.start), usize::from(self.offset));
        let is_inside = start >= ETHERNET && start + offset + 2 <= length;
        let is_known = match self.kind {
            WHOLE => true,
            TCP4 | TCP6 => self.offset == TCP_CHECKSUM && self.segment >= LEAST && start + 20 <= length,
            _ => false,
        };
        let header = if self.kind == WHOLE { 0 } else { self.header.min(length as u16) };
        let segment = if self.kind == WHOLE { 0 } else { self.segment };
        (is_inside && is_known).then_some(Self { flags: NEEDS_CHECKSUM, header, segment, ..self })
    }

    /// Returns true if a driver takes a frame like this as it is.
    #[must_use]
    pub fn suits(self, accepted: Accepted) -> bool {
        let takes_kind = match self.kind {
            TCP4 => accepted.tcp4,
            TCP6 => accepted.tcp6,
            _ => true,
        };
        takes_kind && (accepted.checksums || self.flags & NEEDS_CHECKSUM == 0)
    }

    /// Does the work: returns frames for which nothing is left to do. A frame that makes no sense is lost.
    #[must_use]
    pub fn complete(self, mut frame: Vec<u8>) -> Vec<Vec<u8>> {
        if self.flags & NEEDS_CHECKSUM == 0 {
            return vec![frame];
        }
        if self.kind == WHOLE {
            return self.sum(&mut frame).map_or_else(Vec::new, |()| vec![frame]);
        }
        self.divide(&frame).unwrap_or_default()
    }

    /// Completes the checksum, which holds the sum of the pseudo-header.
    fn sum(self, frame: &mut [u8]) -> Option<()> {
        let rest = frame.get_mut(self.start.into()..)?;
        let sum = match !fold(add(0, rest)) {
            0 if self.offset == UDP_CHECKSUM => u16::MAX,
            sum => sum,
        };
        let at = usize::from(self.offset);
        rest.get_mut(at..at + 2)?.copy_from_slice(&sum.to_be_bytes());
        Some(())
    }

    /// Divides a TCP segment.
    fn divide(self, frame: &[u8]) -> Option<Vec<Vec<u8>>> {
        let start = usize::from(self.start);
        let is_ip4 = match (self.kind, frame.get(12..ETHERNET)?) {
            (TCP4, [0x08, 0x00]) => true,
            (TCP6, [0x86, 0xDD]) => false,
            _ => return None,
        };
        if start < ETHERNET + if is_ip4 { 20 } else { 40 } {
            return None;
        }
        let end_of_headers = start + usize::from(frame.get(start + 12)? >> 4) * 4;
        let (headers, payload) = frame.split_at_checked(end_of_headers)?;
        if end_of_headers < start + 20 || end_of_headers > LONGEST_HEADERS {
            return None;
        }
        let parts = payload.chunks(self.segment.into());
        let count = parts.len();
        let part = |(number, part): (usize, &[u8])| {
            let one = Part {
                number: number as u16,
                at: number * usize::from(self.segment),
                is_last: number + 1 == count,
            };
            let mut made = [headers, part].concat();
            one.correct_ip(&mut made, is_ip4)?;
            one.correct_tcp(&mut made, start)?;
            pseudo_header(&mut made, start, is_ip4)?;
            self.sum(&mut made)?;
            Some(made)
        };
        parts.enumerate().map(part).collect()
    }
}

/// A part of a divided segment.
struct Part {
    number: u16,
    /// The offset of its bytes.
    at: usize,
    is_last: bool,
}

impl Part {
    /// Writes the part's length, and with IPv4 a number of its own and the header's checksum.
    fn correct_ip(&self, frame: &mut [u8], is_ip4: bool) -> Option<()> {
        let ip = frame.get_mut(ETHERNET..)?;
        let length = u16::try_from(ip.len()).ok()?;
        if !is_ip4 {
            return put(ip, 4, length - 40);
        }
        put(ip, 2, length)?;
        let number = take(ip, 4)?.wrapping_add(self.number);
        put(ip, 4, number)?;
        put(ip, 10, 0)?;
        let header = usize::from(*ip.first()? & 0xF) * 4;
        let sum = !fold(add(0, ip.get(..header)?));
        put(ip, 10, sum)
    }

    /// Writes the part's place in the stream. Only the last part ends it, and only the first one says that
    /// the window was reduced.
    fn correct_tcp(&self, frame: &mut [u8], start: usize) -> Option<()> {
        const FIN_AND_PUSH: u8 = 0x09;
        const REDUCED: u8 = 0x80;
        let tcp = frame.get_mut(start..)?;
        let sequence: [u8; 4] = tcp.get(4..8)?.try_into().ok()?;
        let sequence = u32::from_be_bytes(sequence).wrapping_add(self.at as u32);
        tcp.get_mut(4..8)?.copy_from_slice(&sequence.to_be_bytes());
        let flags = tcp.get_mut(13)?;
        *flags &= if self.is_last { !0 } else { !FIN_AND_PUSH };
        *flags &= if self.number == 0 { !0 } else { !REDUCED };
        Some(())
    }
}

/// Writes the sum of TCP's pseudo-header where the checksum will be.
fn pseudo_header(frame: &mut [u8], start: usize, is_ip4: bool) -> Option<()> {
    const TCP: u16 = 6;
    let addresses = if is_ip4 { ETHERNET + 12..ETHERNET + 20 } else { ETHERNET + 8..ETHERNET + 40 };
    let length = u16::try_from(frame.len() - start).ok()?;
    let sum = add(u64::from(TCP) + u64::from(length), frame.get(addresses)?);
    put(frame, start + usize::from(TCP_CHECKSUM), fold(sum))
}

fn take(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2).map(|pair| u16::from_be_bytes([pair[0], pair[1]]))
}

fn put(bytes: &mut [u8], at: usize, number: u16) -> Option<()> {
    bytes.get_mut(at..at + 2).map(|pair| pair.copy_from_slice(&number.to_be_bytes()))
}

/// Adds bytes to the sum of the Internet's checksum: numbers of two bytes.
fn add(sum: u64, bytes: &[u8]) -> u64 {
    let pairs = bytes.chunks_exact(2);
    let odd = pairs.remainder().first().map_or(0, |&byte| u64::from(byte) << 8);
    pairs.fold(sum + odd, |sum, pair| sum + u64::from(u16::from_be_bytes([pair[0], pair[1]])))
}

fn fold(mut sum: u64) -> u16 {
    while sum > 0xFFFF {
        sum = (sum & 0xFFFF) + (sum >> 16);
    }
    sum as u16
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Makes a TCP segment as a driver sends it, with the sum of its pseudo-header alone.
    fn segment(is_ip4: bool, payload: &[u8], flags: u8) -> (Vec<u8>, Offload) {
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        let start = if is_ip4 {
            frame.extend([
                0x08, 0x00, 0x45, 0, 0, 0, 0x12, 0xFE, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
            ]);
            34
        } else {
            frame.extend([0x86, 0xDD, 0x60, 0, 0, 0, 0, 0, 6, 64]);
            frame.extend([0xFD; 32]);
            54
        };
        frame.extend([
            0x12, 0x34, 0, 80, 0xFF, 0xFF, 0xFF, 0x00, 1, 2, 3, 4, 0x80, flags, 0x10, 0, 0, 0, 0, 0,
        ]);
        frame.extend([1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2]);
        frame.extend(payload);
        if is_ip4 {
            Part { number: 0, at: 0, is_last: true }.correct_ip(&mut frame, true).unwrap();
        } else {
            let length = (frame.len() - 54) as u16;
            put(&mut frame, 18, length).unwrap();
        }
        pseudo_header(&mut frame, start, is_ip4).unwrap();
        let kind = if is_ip4 { TCP4 } else { TCP6 };
        let (start, header) = (start as u16, start as u16 + 32);
        (frame, Offload { flags: NEEDS_CHECKSUM, kind, header, segment: 1000, start, offset: TCP_CHECKSUM })
    }

    /// Checks a frame as a receiver does: lengths, and sums that are all ones.
    fn check(frame: &[u8], is_ip4: bool) {
        let start = if is_ip4 { 34 } else { 54 };
        if is_ip4 {
            assert_eq!(fold(add(0, &frame[14..34])), 0xFFFF);
            assert_eq!(usize::from(take(frame, 16).unwrap()), frame.len() - 14);
        } else {
            assert_eq!(usize::from(take(frame, 18).unwrap()), frame.len() - 54);
        }
        let addresses = if is_ip4 { &frame[26..34] } else { &frame[22..54] };
        let sum = add(6 + (frame.len() - start) as u64, addresses);
        assert_eq!(fold(add(sum, &frame[start..])), 0xFFFF);
    }

    proptest! {
        #[test]
        fn parts_of_a_segment_are_the_segment(
            payload in proptest::collection::vec(any::<u8>(), 1..9000),
            size in 8..3000_u16,
            is_ip4: bool,
        ) {
            const ALL: u8 = 0xFF;
            let (frame, offload) = segment(is_ip4, &payload, ALL);
            let offload = Offload { segment: size, ..offload }.checked(frame.len()).unwrap();
            let parts = offload.complete(frame.clone());
            let end = usize::from(offload.header);
            let start = usize::from(offload.start);
            prop_assert_eq!(parts.len(), payload.len().div_ceil(size.into()));
            let mut sequence = 0xFFFF_FF00_u32;
            let mut joined: Vec<u8> = Vec::new();
            for (number, part) in parts.iter().enumerate() {
                check(part, is_ip4);
                prop_assert_eq!(u32::from_be_bytes(part[start + 4..start + 8].try_into().unwrap()), sequence);
                let (is_first, is_last) = (number == 0, number + 1 == parts.len());
                let flags = ALL & if is_last { ALL } else { !0x09 } & if is_first { ALL } else { !0x80 };
                prop_assert_eq!(part[start + 13], flags);
                if is_ip4 {
                    prop_assert_eq!(take(part, 18).unwrap(), 0x12FE_u16.wrapping_add(number as u16));
                }
                sequence = sequence.wrapping_add((part.len() - end) as u32);
                joined.extend(&part[end..]);
            }
            prop_assert!(joined == payload);
        }

        #[test]
        fn no_offload_makes_it_panic(
            bytes: [u8; Offload::SIZE],
            mut frame in proptest::collection::vec(any::<u8>(), 14..300),
            kind in prop_oneof![Just(0_u8), Just(1), Just(4)],
            is_ip4: bool,
            is_plain: bool,
        ) {
            let mut bytes = bytes;
            if is_plain {
                bytes = [1, kind, 0, 0, bytes[4] | 8, 0, bytes[6] % 80, 0, 16, 0];
            }
            let end: [u8; 2] = if is_ip4 { [8, 0] } else { [0x86, 0xDD] };
            frame[12..14].copy_from_slice(&end);
            if let Some(offload) = Offload::from_bytes(bytes).checked(frame.len()) {
                let length = frame.len();
                let frames = offload.complete(frame);
                prop_assert!(frames.iter().all(|one| one.len() <= length));
            }
        }
    }

    #[test]
    fn a_checksum_alone_is_completed() {
        let (frame, offload) = segment(true, b"odd", 0x18);
        let whole = Offload { kind: WHOLE, ..offload }.checked(frame.len()).unwrap();
        assert!(!whole.suits(Accepted::default()));
        assert!(whole.suits(Accepted { checksums: true, ..Accepted::default() }));
        let [completed] = &whole.complete(frame)[..] else { panic!("one frame") };
        check(completed, true);
    }

    #[test]
    fn fields_are_those_of_virtio_and_are_checked() {
        let bytes = [1, 4, 0x56, 0, 0xE8, 3, 54, 0, 16, 0];
        let offload = Offload::from_bytes(bytes);
        assert_eq!((offload.start, offload.offset, offload.segment, offload.header), (54, 16, 1000, 0x56));
        assert_eq!(offload.to_bytes(), bytes);
        assert_eq!(offload.checked(1000), Some(offload));
        assert_eq!(offload.checked(60), None);
        assert_eq!(Offload { kind: 3, ..offload }.checked(1000), None);
        assert_eq!(Offload { flags: 0, ..offload }.checked(1000), None);
        assert_eq!(Offload { offset: 6, ..offload }.checked(1000), None);
        assert_eq!(Offload { start: 13, ..offload }.checked(1000), None);
        assert_eq!(Offload { start: u16::MAX, offset: u16::MAX, kind: WHOLE, ..offload }.checked(1000), None);
        let nothing = Offload { flags: 2, kind: WHOLE, ..offload };
        assert_eq!(nothing.checked(14), Some(Offload::default()));
    }
}
