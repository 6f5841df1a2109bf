//! Vision models against transformers. `fixtures/make_images.py` writes the models and the results.

mod images {
    mod encoder;
    mod fixture;
    mod loading;
    mod mmproj;
    mod prompt;
    mod qwen3_vl;
    mod regions;
}
