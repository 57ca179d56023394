//! A machine's memory, as QEMU has saved it from physical address 0 on.

/// Entries of page tables.
const PRESENT: u64 = 1;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
pub const PAGE: u64 = 4096;

/// Returns the bytes at this place.
pub fn bytes_at(memory: &[u8], at: u64, length: usize) -> Option<&[u8]> {
    let start = usize::try_from(at).ok()?;
    memory.get(start..start.checked_add(length)?)
}

pub fn u16_at(memory: &[u8], at: u64) -> Option<u16> {
    Some(u16::from_le_bytes(bytes_at(memory, at, 2)?.try_into().ok()?))
}

pub fn u32_at(memory: &[u8], at: u64) -> Option<u32> {
    Some(u32::from_le_bytes(bytes_at(memory, at, 4)?.try_into().ok()?))
}

pub fn u64_at(memory: &[u8], at: u64) -> Option<u64> {
    Some(u64::from_le_bytes(bytes_at(memory, at, 8)?.try_into().ok()?))
}

/// Returns the physical address of a virtual one, by the four levels of page tables at `root`.
pub fn translate(memory: &[u8], root: u64, virt: u64) -> Option<u64> {
    let mut table = root;
    for shift in [39, 30, 21, 12] {
        let entry = u64_at(memory, table + (virt >> shift & 511) * 8)?;
        if entry & PRESENT == 0 {
            return None;
        }
        if shift == 12 || (shift < 39 && entry & LARGE != 0) {
            let within = (1 << shift) - 1;
            return Some((entry & ADDRESS & !within) | (virt & within));
        }
        table = entry & ADDRESS;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_and_large_pages_are_found() {
        let mut memory = vec![0; 0x5000];
        let mut put = |at: usize, value: u64| memory[at..at + 8].copy_from_slice(&value.to_le_bytes());
        put(0x1000 + 8 * 511, 0x2000 | PRESENT);
        put(0x2000 + 8, 0x3000 | PRESENT);
        put(0x3000 + 16, 0x4000 | PRESENT);
        put(0x3000 + 24, 0x0060_0000 | LARGE | PRESENT);
        put(0x4000, 0x0077_7000 | PRESENT | 1 << 63);
        let base = 0xffff_ff80_0000_0000 | 1 << 30;
        assert_eq!(translate(&memory, 0x1000, base | 2 << 21 | 0x123), Some(0x0077_7123));
        assert_eq!(translate(&memory, 0x1000, base | 3 << 21 | 0x1234), Some(0x0060_1234));
        assert_eq!(translate(&memory, 0x1000, base | 4 << 21), None);
    }
}
