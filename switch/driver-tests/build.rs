//! Compiles the driver's arithmetic for the host. `host/` stands for the kernel's headers.

const FILES: [&str; 3] = ["frames.c", "landing.c", "places.c"];

fn main() {
    let mut build = cc::Build::new();
    // The exhaustive tests call this code millions of times.
    build.opt_level(2);
    build.include("host").warnings_into_errors(true).flag("-Wno-sign-compare").flag("-Wno-type-limits");
    for file in FILES {
        build.file(format!("../driver/snapshot/{file}"));
    }
    build.file("../driver/watch/judge.c");
    build.file("host/layout.c");
    build.compile("mercury_driver_arithmetic");
    println!("cargo::rerun-if-changed=host");
    println!("cargo::rerun-if-changed=../driver/snapshot");
    println!("cargo::rerun-if-changed=../driver/watch");
    println!("cargo::rerun-if-changed=../driver/mercury_abi.h");
}
