//! A merged chain of images holds the memory of the last image, frame by frame, or is refused. The
//! tests compare it with a model: a map of frames.

use std::{
    collections::BTreeMap,
    io::{Cursor, Read},
};

use mercury_image::{
    Chain, Chunk, Commit, Error, FileSystem, Frame, Hashes, Identity, Key, Kind, LOW_END_PHYS, Machine,
    Merged, PAGE, Packer, Parent, Part, Range, Reader, Result, Source, Writer, order, verify,
};
use proptest::prelude::*;

const KEY: Key = Key([5; 32]);

/// The model's memory: the content of each frame as a number. 0 is a frame of zeros.
type Memory = BTreeMap<u64, u32>;
type Bytes = Cursor<Vec<u8>>;

/// Returns a page for a content: text for even numbers, noise for odd ones.
fn page(content: u32) -> Vec<u8> {
    let mut page = Vec::with_capacity(PAGE);
    if content == 0 {
        page.resize(PAGE, 0);
    } else if content.is_multiple_of(2) {
        page.extend(content.to_le_bytes().iter().cycle().take(PAGE));
    } else {
        let mut hasher = blake3::Hasher::new();
        page.resize(PAGE, 0);
        hasher.update(&content.to_le_bytes()).finalize_xof().fill(&mut page);
    }
    page
}

fn frames(memory: &Memory) -> Vec<(u64, u32)> {
    let mut frames: Vec<_> = memory.iter().map(|(phys, content)| (*phys, *content)).collect();
    frames.sort_by_key(|(phys, _)| order(*phys));
    frames
}

fn machine(memory: &Memory, parents: Vec<Identity>) -> Machine {
    let mut ranges: Vec<Range> = Vec::new();
    for phys in memory.keys().copied() {
        match ranges.last_mut() {
            Some(range) if range.start_phys + range.pages * PAGE as u64 == phys => range.pages += 1,
            _ => ranges.push(Range { start_phys: phys, pages: 1, kind: Kind::Kept }),
        }
    }
    Machine { host: "node7".into(), ranges, parents, ..Machine::default() }
}

fn written(identity: u8, machine: &Machine, parts: impl IntoIterator<Item = Part>) -> Bytes {
    let mut bytes = Vec::new();
    let mut writer = Writer::begin(&mut bytes, Identity([identity; 16]), machine).expect("begun");
    for part in parts {
        writer.add(&part.compress(1).expect("compressed")).expect("added");
    }
    writer.commit().expect("committed");
    Cursor::new(bytes)
}

/// Makes an image as the command does.
fn image(identity: u8, memory: &Memory, parent: Option<&Bytes>) -> Bytes {
    let mut parent = parent.map(|parent| Parent::open(parent.clone()).expect("a parent"));
    let lineage = parent.as_ref().map(Parent::lineage).unwrap_or_default();
    let mut packer = Packer::new(parent.as_ref().map_or(KEY, Parent::key));
    let mut parts = Vec::new();
    for (phys, content) in frames(memory) {
        let before = parent.as_mut().and_then(|parent| parent.hash_of(phys).expect("a hash"));
        packer.add(phys, &page(content), before);
        parts.extend(std::iter::from_fn(|| packer.full()));
    }
    parts.extend(packer.finish());
    written(identity, &machine(memory, lineage), parts)
}

fn chain(images: &[Bytes]) -> Result<Merged<Bytes>> {
    let mut chain = Chain::default();
    for image in images {
        chain.begin(image.clone())?;
        while chain.step()? {}
    }
    chain.merged()
}

/// Merges images as the command does.
fn merged(images: &[Bytes]) -> Result<Bytes> {
    let mut merged = chain(images)?;
    let mut packer = Packer::new(merged.key());
    let mut parts = Vec::new();
    while let Some(hashes) = merged.next_frames()? {
        for (phys, hash) in hashes.iter() {
            packer.add_known(phys, hash, |to| merged.find(phys, hash, to))?;
            parts.extend(std::iter::from_fn(|| packer.full()));
        }
    }
    parts.extend(packer.finish());
    Ok(written(merged.identity().0[0], merged.machine(), parts))
}

/// Returns the content of a full image, read without the code that wrote it.
fn content(image: &Bytes) -> BTreeMap<u64, Vec<u8>> {
    let mut reader = Reader::open(image.clone()).expect("an image");
    assert!(reader.machine().parents.is_empty());
    let mut memory = BTreeMap::new();
    while let Some(chunk) = reader.next_chunk().expect("a chunk") {
        let mut data = chunk.data.chunks(PAGE);
        for Frame { phys, source } in chunk.frames {
            let page = match source {
                Source::Data => data.next().expect("data").to_vec(),
                Source::Zero => vec![0; PAGE],
                Source::Frame(twin) => BTreeMap::get(&memory, &twin).cloned().expect("a frame before it"),
                Source::Parent(_) => panic!("it is full"),
            };
            assert_eq!(memory.insert(phys, page), None, "{phys:#x} twice");
        }
    }
    memory
}

fn holds(image: &Bytes, memory: &Memory) -> bool {
    content(image) == memory.iter().map(|(phys, content)| (*phys, page(*content))).collect()
}

fn commit(image: &Bytes) -> Commit {
    verify(image.clone(), |_| {}).expect("whole").2
}

/// Returns memory with frames on both sides of the address at which the order turns.
fn some_memory(pages: u64) -> Memory {
    let start = LOW_END_PHYS - pages / 2 * PAGE as u64;
    (0..pages).map(|page| (start + page * PAGE as u64, (page * 7 % 23) as u32)).collect()
}

fn changed(memory: &Memory, changes: &[(u64, u32)]) -> Memory {
    let mut memory = memory.clone();
    memory.extend(changes.iter().copied());
    memory
}

/// Returns a full image and two images made on it, with their memories.
fn three() -> ([Bytes; 3], [Memory; 3]) {
    let first = some_memory(900);
    let start = *first.keys().next().expect("frames");
    let second = changed(&first, &[(start, 1001), (start + 0x5000, 0), (LOW_END_PHYS, 1003)]);
    let third = changed(&second, &[(start + 0x1000, 1001), (LOW_END_PHYS, 7), (start, 0)]);
    let base = image(1, &first, None);
    let next = image(2, &second, Some(&base));
    let last = image(3, &third, Some(&next));
    ([base, next, last], [first, second, third])
}

#[test]
fn unchanged_frames_cost_nothing() {
    let ([base, next, last], memories) = three();
    assert_eq!((commit(&base).unchanged, commit(&next).unchanged), (0, 897));
    assert_eq!(commit(&next).frames, 900);
    for count in 1..=3 {
        let whole = merged(&[base.clone(), next.clone(), last.clone()][..count]).expect("merged");
        assert!(holds(&whole, &memories[count - 1]), "{count}");
    }
    // The hashes are left out of the sum.
    let hashes = 900 * 16;
    assert!(next.get_ref().len() < hashes + 12_000, "{}", next.get_ref().len());
}

/// Data of many records is fetched from scattered places.
#[test]
fn more_than_a_record_has_room_for() {
    let first: Memory = (0..1500).map(|page| (0x10_0000 + page * PAGE as u64, 3 + 2 * page as u32)).collect();
    let frame = |page: u64| 0x10_0000 + page * PAGE as u64;
    // Some frames are overwritten, and their content found again elsewhere, as it was in the first
    // image or in the second.
    let second = changed(&first, &[(frame(0), 4), (frame(700), 6), (frame(1400), 3), (frame(1401), 1403)]);
    let third = changed(&second, &[(frame(1400), 8), (frame(1499), 4), (frame(3), 3), (frame(1), 2999)]);
    let base = image(1, &first, None);
    let next = image(2, &second, Some(&base));
    let last = image(3, &third, Some(&next));
    assert!(commit(&base).records > 6);
    assert!(holds(&merged(&[base.clone(), next.clone()]).expect("merged"), &second));
    assert!(holds(&merged(&[base, next, last]).expect("merged"), &third));
}

/// A merged image is its last one in another form: images made before remain valid on it, and new
/// ones can be made on it.
#[test]
fn a_merged_image_takes_the_place_of_those_it_was_made_of() {
    let ([base, next, last], memories) = three();
    let middle = merged(&[base, next]).expect("merged");
    assert!(holds(&merged(&[middle.clone(), last.clone()]).expect("merged"), &memories[2]));
    let later = image(4, &memories[0], Some(&middle));
    assert!(holds(&merged(&[middle, later]).expect("merged"), &memories[0]));
}

fn refused(images: &[&Bytes]) -> String {
    let images: Vec<_> = images.iter().map(|image| (*image).clone()).collect();
    merged(&images).map(drop).expect_err("refused").to_string()
}

#[test]
fn images_that_do_not_go_together_are_refused() {
    let ([base, next, last], memories) = three();
    let other = image(9, &memories[0], None);
    assert!(refused(&[&next]).contains("is missing"));
    assert!(refused(&[&base, &last]).contains("the image that has to come before it"));
    assert!(refused(&[&next, &base]).contains("is missing"));
    assert!(refused(&[&base, &last, &next]).contains("the image that has to come before it"));
    assert!(refused(&[&base, &next, &base]).contains("a full image"));
    assert!(refused(&[&base, &base]).contains("a full image"));
    assert!(refused(&[&other, &next]).contains("is not 09"));
    assert!(refused(&[]).contains("no image"));
}

/// A cut or a flipped bit anywhere in any image is refused in the merge.
#[test]
fn damage_anywhere_is_refused() {
    let (images, _) = three();
    for (number, image) in images.iter().enumerate() {
        let length = image.get_ref().len();
        let with = |bytes: Vec<u8>| {
            let mut images = images.to_vec();
            images[number] = Cursor::new(bytes);
            merged(&images)
        };
        for cut in (0..length).step_by(length / 50) {
            assert!(with(image.get_ref()[..cut].to_vec()).is_err(), "{number}: cut at {cut}");
        }
        for bit in (0..length * 8).step_by(length * 8 / 400) {
            let mut bytes = image.get_ref().clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(with(bytes).is_err(), "{number}: bit {bit}");
        }
    }
}

/// A parent's frames are not read. Every hash that is read of it is right, or refused.
#[test]
fn a_damaged_parent_gives_no_wrong_hash() {
    let base = image(1, &some_memory(600), None);
    let hashes = |bytes: &[u8]| -> Result<Vec<_>> {
        let mut parent = Parent::open(Cursor::new(bytes.to_vec()))?;
        frames(&some_memory(600)).iter().map(|(phys, _)| parent.hash_of(*phys)).collect()
    };
    let bytes = base.into_inner();
    let right = hashes(&bytes).expect("hashes");
    assert!(right.iter().all(Option::is_some));
    let mut refused = 0;
    for bit in (0..bytes.len() * 8).step_by(bytes.len() * 8 / 2000) {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        match hashes(&damaged) {
            Ok(found) => assert_eq!(found, right, "bit {bit}"),
            Err(_) => refused += 1,
        }
    }
    assert!(refused > 10, "{refused}");
    for cut in (0..bytes.len()).step_by(211) {
        assert!(hashes(&bytes[..cut]).is_err(), "cut at {cut}");
    }
}

/// Hostile images are refused: every checksum is right, and the statements are false.
#[test]
fn lies_are_refused() {
    let memory: Memory = [(0x1000, 2), (0x2000, 3), (0x3000, 4)].into();
    let base = image(1, &memory, None);
    let parents = vec![Identity([1; 16])];
    let next = |memory: &Memory, frames: &[(u64, Source)], hashes: &[(u64, u32)], key: Key| {
        let frames: Vec<_> =
            frames.iter().map(|(phys, source)| Frame { phys: *phys, source: *source }).collect();
        let data = frames.iter().filter(|frame| frame.source == Source::Data).flat_map(|_| page(5)).collect();
        let mut table = Hashes { key, ..Hashes::default() };
        hashes.iter().for_each(|(phys, content)| table.add(*phys, key.hash(&page(*content))));
        let parts = [Part::Frames(Chunk { frames, data }), Part::Hashes(table)];
        written(2, &machine(memory, parents.clone()), parts)
    };
    use Source::{Data, Frame as Twin, Parent as Same, Zero};
    let all = [(0x1000, 2), (0x2000, 3), (0x3000, 5)];
    let good = next(&memory, &[(0x1000, Same(2)), (0x3000, Data)], &all, KEY);
    assert!(holds(&merged(&[base.clone(), good.clone()]).expect("merged"), &all.into()));
    assert!(refused(&[&good]).contains("is missing"));

    let wider = changed(&memory, &[(0x4000, 5)]);
    let four = [all[0], all[1], all[2], (0x4000, 5)];
    let lies = [
        (next(&memory, &[(0x1000, Same(3))], &all, KEY), "has changed since"),
        (next(&memory, &[(0x1000, Same(2))], &all, KEY), "all of the machine's memory"),
        (next(&memory, &[(0x1000, Same(2)), (0x3000, Data)], &all[..2], KEY), "all of the machine's memory"),
        (next(&memory, &[(0x1000, Same(3)), (0x3000, Data)], &all, KEY), "is there twice"),
        (next(&memory, &[(0x1000, Same(2)), (0x3000, Zero)], &all, KEY), "has changed since"),
        (next(&memory, &[(0x1000, Twin(0x2000))], &all, KEY), "does not come before"),
        (next(&memory, &[(0x9000, Zero)], &all, KEY), "not part of the machine's memory"),
        (next(&wider, &[(0x1000, Same(4))], &four, KEY), "its parent does not have"),
        (next(&memory, &[(0x1000, Same(2)), (0x3000, Data)], &all, Key([6; 32])), "another key"),
        (next(&memory, &[(0x1000, Same(2)), (0x3000, Data)], &[all[1], all[0], all[2]], KEY), "in order"),
        (next(&memory, &[(0x1000, Same((1 << 52) - 1))], &all, KEY), "one of its entries is invalid"),
        (next(&memory, &[(0x1000, Same(1 << 40))], &all, KEY), "its parent does not have"),
    ];
    for (lie, reason) in lies {
        let said = refused(&[&base, &lie]);
        assert!(said.contains(reason), "{reason}: {said}");
    }
}

/// An image without a parent cannot leave a frame to one, and has no room for more frames than
/// there are.
#[test]
fn a_full_image_is_full() {
    let memory: Memory = [(0x1000, 2)].into();
    let chunk = |source| {
        let frames = vec![Frame { phys: 0x1000, source }];
        written(1, &machine(&memory, Vec::new()), [Part::Frames(Chunk { frames, data: Vec::new() })])
    };
    let error = verify(chunk(Source::Parent(1)), |_| {}).expect_err("refused");
    assert!(matches!(error, Error::Damaged(place, _) if place.record == 1), "{error}");
    // On an image without hashes no other can be made.
    let error = Parent::open(chunk(Source::Zero)).map(drop).expect_err("refused");
    assert!(error.to_string().contains("no hashes"), "{error}");
}

/// A false size of memory costs no memory: only frames do.
#[test]
fn a_large_machine_without_frames_takes_no_memory() {
    let empty = |pages| {
        let range = Range { start_phys: 0, pages, kind: Kind::Kept };
        refused(&[&written(1, &Machine { ranges: vec![range], ..Machine::default() }, [])])
    };
    assert!(empty(1 << 50).contains("too large"));
    assert!(empty((1 << 34) + 1).contains("too large"));
    assert!(empty(1 << 34).contains("does not have all of the machine's memory"));
    let status = std::fs::read_to_string("/proc/self/status").expect("a status");
    let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a line");
    let most: u64 = most.trim().trim_end_matches(" kB").parse().expect("a number");
    assert!(most < 2 << 20, "{most} KiB");
}

/// Images of older versions are still read.
#[test]
fn older_versions_are_read() {
    for version in [1, 2] {
        let mut bytes = image(1, &some_memory(10), None).into_inner();
        bytes[16] = version;
        assert!(verify(Cursor::new(bytes), |_| {}).is_ok());
    }
}

/// The fingerprint of a file system in an image of version 2 keeps its disk from being restored
/// beside a changed one.
#[test]
fn a_fingerprint_of_version_2_is_read() {
    let text =
        r#"{"mounted_at":"/","kind":"ext4","device":"/dev/vda","uuid":null,"frozen":true,"mark":"12"}"#;
    let found: FileSystem = serde_json::from_str(text).expect("a file system");
    assert_eq!(found.fingerprint.as_deref(), Some("12"));
    assert!(serde_json::to_string(&found).expect("JSON").contains("\"fingerprint\":\"12\""));
}

fn change() -> impl Strategy<Value = (u64, Option<u32>)> {
    // The few different contents give zeros, twins, and pages that return to an earlier content.
    (0_u64..700, prop_oneof![8 => (0_u32..40).prop_map(Some), 1 => Just(None)])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// Any machine, any changes, memory that comes and goes: each image of the chain gives the
    /// memory of its instant.
    #[test]
    fn any_chain_is_what_memory_was(
        pages in 1_u64..700,
        steps in proptest::collection::vec(proptest::collection::vec(change(), 0..60), 0..5),
    ) {
        let start = LOW_END_PHYS - 300 * PAGE as u64;
        let mut memory = some_memory(pages);
        memory.insert(start, 9);
        let mut images = vec![image(1, &memory, None)];
        for (number, changes) in steps.iter().enumerate() {
            for (page, content) in changes {
                let phys = start + page * PAGE as u64;
                match content {
                    Some(content) => drop(memory.insert(phys, *content)),
                    None if memory.len() > 1 => drop(memory.remove(&phys)),
                    None => {}
                }
            }
            images.push(image(2 + number as u8, &memory, images.last()));
            let whole = merged(&images);
            prop_assert!(whole.is_ok_and(|whole| holds(&whole, &memory)), "after step {}", number);
        }
        // Further images made on a merged one behave the same.
        let cut = images.len() / 2;
        let whole = merged(&images[..=cut]).expect("merged");
        let rest: Vec<_> = std::iter::once(whole).chain(images[cut + 1..].iter().cloned()).collect();
        prop_assert!(holds(&merged(&rest).expect("merged"), &memory));
    }

    /// A stretch of an image made on another is replaced: the chain is refused, or still gives the
    /// same.
    #[test]
    fn replaced_stretches_are_refused(
        at in 0_usize..200_000,
        with in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        let ([base, next, _], _) = three();
        let mut bytes = Vec::new();
        next.clone().read_to_end(&mut bytes).expect("read");
        let at = at % bytes.len();
        let end = (at + with.len()).min(bytes.len());
        bytes[at..end].copy_from_slice(&with[..end - at]);
        let same = bytes == *next.get_ref();
        prop_assert_eq!(merged(&[base, Cursor::new(bytes)]).is_ok(), same);
    }
}
