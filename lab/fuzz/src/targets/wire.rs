//! The stream of a moving machine, from an authenticated peer that is hostile.
//!
//! The first byte of an input is the number of the stream. Frames follow as records
//! ([`crate::input`]): the target makes their headers. A first byte of 255 marks raw bytes.

use crate::{
    Target,
    input::{COMPRESSED, OUT_OF_ORDER, Record, WRONG_SUM, outcome, record, records},
};
use mercury_migration::{
    protocol::{Attempt, Digest, Word},
    wire::{Chunks, DiskLedger, Frame, Ledger, PAGE, Pages, Reader, Writer, hash_of_chunk, unpack_text},
};

const ATTEMPT: Attempt = Attempt([7; 16]);
const RAW: u8 = 255;
/// Size of the disk that was offered, in bytes: two whole chunks and a sector.
const DISK: u64 = (2 << 16) + 512;

pub const TARGET: Target = Target { name: "wire", run, seeds };

fn seeds() -> Vec<Vec<u8>> {
    let mut raw = Writer::begin(Vec::new(), ATTEMPT, 0).expect("begun");
    raw.say(Word::Offer, b"{}").expect("said");
    raw.round(0).expect("a round");
    raw.say(Word::Final(Digest([1; 32])), &[]).expect("said");
    let raw = [&[RAW], &raw.into_inner()[..]].concat();

    let page_of = |kind: u64, phys: u64| (phys | kind).to_le_bytes();
    let pages = [&3_u32.to_le_bytes()[..], &page_of(1, 0x1000), &page_of(2, 0x2000), &page_of(3, 0x3000)];
    let pages = [&pages.concat()[..], &[0xA5; PAGE]].concat();
    let chunks =
        [&0_u32.to_le_bytes()[..], &2_u32.to_le_bytes(), &(1_u64).to_le_bytes(), &512_u32.to_le_bytes()];
    let chunks = [&chunks.concat()[..], &(0x2_0000_u64 | 2).to_le_bytes(), &512_u32.to_le_bytes(), &[7; 512]];
    let offer = [&[1][..], &[0; 32], b"{\"machine\":{}}"].concat();
    let made = [
        vec![0],
        record(1, 0, &offer),
        record(2, 0, &0_u64.to_le_bytes()),
        record(3, COMPRESSED, &pages),
        record(5, COMPRESSED, &chunks.concat()),
        record(2, 0, &1_u64.to_le_bytes()),
        record(1, 0, &[&[2][..], &[9; 32]].concat()),
    ]
    .concat();
    let other = [vec![2], record(4, 0, &[5; 32]), record(3, COMPRESSED, &pages)].concat();
    vec![raw, made, other]
}

/// Makes a stream with right checksums.
fn forged(stream: u8, frames: &[Record]) -> Vec<u8> {
    let greeting = Writer::begin(Vec::new(), ATTEMPT, stream.into()).expect("begun").into_inner();
    let mut bytes = greeting.clone();
    for (number, frame) in frames.iter().enumerate() {
        let mut payload = frame.payload.clone();
        if frame.has(COMPRESSED) {
            let packed = zstd::bulk::compress(&payload, 1).expect("compressed");
            payload = [&(payload.len() as u32).to_le_bytes()[..], &packed].concat();
        }
        let number = number as u64 + u64::from(frame.has(OUT_OF_ORDER));
        let kind = u32::from(frame.kind).to_le_bytes();
        let header = [&kind[..], &(payload.len() as u32).to_le_bytes(), &number.to_le_bytes()].concat();
        let sum = blake3::hash(&[&greeting[..], &header, &payload].concat());
        let mut sum: [u8; 16] = sum.as_bytes()[..16].try_into().expect("16 bytes");
        sum[0] ^= u8::from(frame.has(WRONG_SUM));
        bytes.extend([&header[..], &sum, &payload].concat());
    }
    bytes
}

fn run(input: &[u8]) -> u64 {
    let bytes = match input.split_first() {
        Some((&RAW, raw)) => raw.to_vec(),
        Some((stream, frames)) => forged(*stream, &records(frames)),
        None => Vec::new(),
    };
    let mut reader = match Reader::open(&bytes[..]) {
        Ok(reader) => reader,
        Err(error) => return outcome(&error.to_string()),
    };
    let mut ledger = Ledger::new(vec![0x1000..0x8_0000, 0x8_0000..0x10_0000]);
    let mut disk = DiskLedger::new(DISK);
    let mut text = String::new();
    loop {
        match reader.next_frame() {
            Ok(Some(frame)) => text += &take(frame, &mut ledger, &mut disk),
            Ok(None) => break,
            Err(error) => {
                text += &error.to_string();
                assert!(reader.next_frame().is_err(), "a refused stream goes on");
                break;
            }
        }
    }
    let _ = (ledger.digest(ATTEMPT), disk.digest(ATTEMPT));
    outcome(&text)
}

/// Does with a frame what a destination does, and returns the outcome.
fn take(frame: Frame, ledger: &mut Ledger, disk: &mut DiskLedger) -> String {
    match frame {
        Frame::Message(message, text) => format!("{:?}{}", message.word, unpack_text(&text).is_ok()),
        Frame::Round(_) => "round".into(),
        Frame::Proof(_) => "proof".into(),
        Frame::Pages(pages) => note_pages(&pages, ledger),
        Frame::Chunks(chunks) => note_chunks(&chunks, disk),
    }
}

fn note_pages(pages: &Pages, ledger: &mut Ledger) -> String {
    let mut text = String::from("pages");
    for page in pages.iter() {
        let (phys, is_inside) = (page.phys, (0x1000..0x10_0000).contains(&page.phys));
        match ledger.note(page) {
            Ok(_) => assert!(is_inside && phys.is_multiple_of(PAGE as u64), "{phys:#x} is nowhere"),
            Err(why) => text += why,
        }
    }
    text
}

fn note_chunks(chunks: &Chunks, disk: &mut DiskLedger) -> String {
    let mut text = String::from("chunks");
    for chunk in chunks.iter() {
        let hash = chunk.data.map_or([0; 16], hash_of_chunk);
        match disk.note(chunk.offset, chunk.length, hash) {
            Ok(_) => {
                let end = chunk.offset.checked_add(chunk.length as u64).expect("an end");
                assert!(end <= DISK, "a chunk behind the disk's end");
                assert!(chunk.data.is_none_or(|data| data.len() == chunk.length), "another length");
            }
            Err(why) => text += why,
        }
    }
    text
}
