#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let _ = (mercury_fuzz::targets::subnet::TARGET.run)(input);
});
