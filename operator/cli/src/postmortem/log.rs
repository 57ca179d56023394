//! The kernel's log, read from its ring in memory (`kernel/printk/printk_ringbuffer.h`). The places of its
//! parts are in the kernel's information for such tools.

use super::memory::{Frames, Memory};

/// States of a descriptor, in the two upper bits of its state.
const COMMITTED: u64 = 1;
const FINALIZED: u64 = 2;
const ID: u64 = !(3 << 62);
/// Records at most: the largest ring has fewer.
const RECORDS_MAX: u64 = 1 << 24;
/// Bytes of one record at most.
const TEXT_MAX: u64 = 1 << 16;

/// Places of the ring's parts.
struct Ring {
    descriptors: u64,
    infos: u64,
    count: u64,
    head: u64,
    tail: u64,
    text: u64,
    text_bytes: u64,
}

impl Ring {
    fn find<F: Frames>(memory: &Memory<'_, F>) -> Option<Self> {
        let told = &memory.told;
        let ring = memory.word(told.symbol("prb")?)?;
        let descriptors = ring + told.offset("printk_ringbuffer.desc_ring")?;
        let text = ring + told.offset("printk_ringbuffer.text_data_ring")?;
        let counter = told.offset("atomic_long_t.counter")?;
        let bits = memory.half(descriptors + told.offset("prb_desc_ring.count_bits")?)?;
        let size_bits = memory.half(text + told.offset("prb_data_ring.size_bits")?)?;
        if bits >= 32 || size_bits >= 40 {
            return None;
        }
        Some(Self {
            descriptors: memory.word(descriptors + told.offset("prb_desc_ring.descs")?)?,
            infos: memory.word(descriptors + told.offset("prb_desc_ring.infos")?)?,
            count: 1 << bits,
            head: memory.word(descriptors + told.offset("prb_desc_ring.head_id")? + counter)?,
            tail: memory.word(descriptors + told.offset("prb_desc_ring.tail_id")? + counter)?,
            text: memory.word(text + told.offset("prb_data_ring.data")?)?,
            text_bytes: 1 << size_bits,
        })
    }

    /// Returns the lines of a record; `None` if it is not complete, or has no text.
    fn record<F: Frames>(&self, memory: &Memory<'_, F>, id: u64) -> Option<Vec<String>> {
        let told = &memory.told;
        let descriptor = self.descriptors + id % self.count * told.size("prb_desc")?;
        let counter = told.offset("atomic_long_t.counter")?;
        let state = memory.word(descriptor + told.offset("prb_desc.state_var")? + counter)?;
        if state & ID != id || ![COMMITTED, FINALIZED].contains(&(state >> 62)) {
            return None;
        }
        let block = descriptor + told.offset("prb_desc.text_blk_lpos")?;
        let begin = memory.word(block + told.offset("prb_data_blk_lpos.begin")?)?;
        let next = memory.word(block + told.offset("prb_data_blk_lpos.next")?)?;
        let info = self.infos + id % self.count * told.size("printk_info")?;
        let time = memory.word(info + told.offset("printk_info.ts_nsec")?)?;
        let length = u64::from(memory.half(info + told.offset("printk_info.text_len")?)? as u16);
        // An odd position stands for a record without text.
        if begin & 1 != 0 {
            return None;
        }
        // A block that does not fit before the end of the ring lies at its start.
        let (first, last) = (begin % self.text_bytes, next % self.text_bytes);
        let first = if begin / self.text_bytes == next / self.text_bytes || last == 0 { first } else { 0 };
        // The block begins with the number of its descriptor.
        let mut text = vec![0; length.min(TEXT_MAX) as usize];
        memory.read(self.text + first + 8, &mut text)?;
        let stamp = format!("[{:5}.{:06}] ", time / 1_000_000_000, time / 1000 % 1_000_000);
        let text = String::from_utf8_lossy(&text).into_owned();
        Some(text.lines().map(|line| format!("{stamp}{line}")).collect())
    }
}

/// Returns the lines of the kernel's log; `None` if its ring cannot be found.
pub fn read<F: Frames>(memory: &Memory<'_, F>) -> Option<Vec<String>> {
    let ring = Ring::find(memory)?;
    let count = (ring.head.wrapping_sub(ring.tail) & ID) + 1;
    let ids = (0..count.min(ring.count).min(RECORDS_MAX)).map(|number| ring.tail.wrapping_add(number) & ID);
    Some(ids.filter_map(|id| ring.record(memory, id)).flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::postmortem::memory::tests::Model;

    const DIRECT: u64 = 0xFFFF_8880_0000_0000;
    /// As Linux 6.1 tells it, with `prb` at the start of the kernel's data.
    const TOLD: &str = "\
NUMBER(phys_base)=0
SYMBOL(prb)=ffffffff80001000
OFFSET(printk_ringbuffer.desc_ring)=0
OFFSET(printk_ringbuffer.text_data_ring)=48
OFFSET(prb_desc_ring.count_bits)=0
OFFSET(prb_desc_ring.descs)=8
OFFSET(prb_desc_ring.infos)=16
OFFSET(prb_desc_ring.head_id)=24
OFFSET(prb_desc_ring.tail_id)=32
SIZE(prb_desc)=24
OFFSET(prb_desc.state_var)=0
OFFSET(prb_desc.text_blk_lpos)=8
OFFSET(prb_data_blk_lpos.begin)=0
OFFSET(prb_data_blk_lpos.next)=8
SIZE(printk_info)=88
OFFSET(printk_info.ts_nsec)=8
OFFSET(printk_info.text_len)=16
OFFSET(prb_data_ring.size_bits)=0
OFFSET(prb_data_ring.data)=8
OFFSET(atomic_long_t.counter)=0
";

    /// A ring of four descriptors and 256 bytes of text.
    fn ring(head: u64, tail: u64) -> Model {
        let model = Model::new(16);
        model.put(0xF000, TOLD.as_bytes());
        model.put_word(0xE000, DIRECT + 0xE000);
        model.put_word(0x1000, DIRECT + 0x2000);
        let words = [
            (0, 2),
            (8, DIRECT + 0x3000),
            (16, DIRECT + 0x4000),
            (24, head),
            (32, tail),
            (48, 8),
            (56, DIRECT + 0x5000),
        ];
        words.into_iter().for_each(|(at, word)| model.put_word(0x2000 + at, word));
        model
    }

    fn record(model: &Model, id: u64, state: u64, begin: u64, text: &str) {
        let slot = id % 4;
        let next = begin + (8 + text.len() as u64).next_multiple_of(8);
        // The next block begins after a wrap.
        let wrapped =
            if next / 256 != begin / 256 { 256 + (8 + text.len() as u64).next_multiple_of(8) } else { next };
        let words = [state << 62 | id, begin, wrapped];
        (0..).zip(words).for_each(|(at, word)| model.put_word(0x3000 + 24 * slot + 8 * at, word));
        model.put_word(0x4000 + 88 * slot + 8, 12_345_678_000 + id);
        model.put(0x4000 + 88 * slot + 16, &(text.len() as u16).to_le_bytes());
        let first = if wrapped == next { begin % 256 } else { 0 };
        model.put(0x5000 + first + 8, text.as_bytes());
    }

    #[test]
    fn records_come_in_their_order() {
        let model = ring(6, 3);
        record(&model, 3, FINALIZED, 120, "the first");
        record(&model, 4, 0, 152, "not written");
        record(&model, 5, FINALIZED, 160, "two\nlines");
        record(&model, 6, COMMITTED, 240, "at the start of the ring");
        let memory = Memory::new(&model, (0xF000, 4096), 0xE000);
        let log = read(&memory).expect("a log");
        assert_eq!(
            log,
            [
                "[   12.345678] the first",
                "[   12.345678] two",
                "[   12.345678] lines",
                "[   12.345678] at the start of the ring"
            ]
        );
    }

    #[test]
    fn a_broken_ring_is_none() {
        let model = ring(6, 3);
        model.put_word(0x2000, 99);
        assert_eq!(read(&Memory::new(&model, (0xF000, 4096), 0xE000)), None);
        assert_eq!(read(&Memory::new(&Model::new(1), (0xF000, 4096), 0xE000)), None);
    }
}
