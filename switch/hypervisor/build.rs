//! Link arguments of the freestanding image: see link.ld.

fn main() {
    let folder = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    println!("cargo:rerun-if-changed=link.ld");
    for argument in [
        "-nostartfiles",
        "-nostdlib",
        "-static-pie",
        "-Wl,--no-dynamic-linker",
        "-Wl,-z,noexecstack",
        "-Wl,-z,max-page-size=4096",
        "-Wl,-z,norelro",
        "-Wl,--build-id=none",
        "-Wl,--hash-style=sysv",
    ] {
        println!("cargo:rustc-link-arg-bins={argument}");
    }
    println!("cargo:rustc-link-arg-bins=-Wl,-T,{folder}/link.ld");
}
