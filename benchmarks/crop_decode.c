/* What a decoder of the crop alone would take: libjpeg-turbo without the rows and columns outside of it, and its
   entropy decoding alone. For `python -m benchmarks decoders` only: nothing of the package calls it. */
#include <setjmp.h>
#include <stdio.h>
#include <jpeglib.h>

struct failing {
  struct jpeg_error_mgr own;
  jmp_buf back;
};

static void fail(j_common_ptr info) { longjmp(((struct failing *)info->err)->back, 1); }

static void say_nothing(j_common_ptr info, int level) {}

static void begin(struct jpeg_decompress_struct *info, struct failing *error, const unsigned char *data, size_t size) {
  info->err = jpeg_std_error(&error->own);
  error->own.error_exit = fail;
  error->own.emit_message = say_nothing;
  jpeg_create_decompress(info);
  jpeg_mem_src(info, data, size);
}

/* RGB rows of the crop into `out`, each `*width` pixels long; returns where the crop begins in a row, or -1. */
int decode_crop(const unsigned char *data, size_t size, int top, int left, int rows, int columns, unsigned char *out,
                int *width) {
  struct jpeg_decompress_struct info;
  struct failing error;
  if (setjmp(error.back)) {
    jpeg_destroy_decompress(&info);
    return -1;
  }
  begin(&info, &error, data, size);
  jpeg_read_header(&info, TRUE);
  info.out_color_space = JCS_RGB;
  jpeg_start_decompress(&info);
  /* A pixel more on both sides: chroma is interpolated between neighbors. */
  JDIMENSION first = left > 0 ? left - 1 : 0, wide = left + columns + 1 - first;
  if (first + wide > info.output_width) wide = info.output_width - first;
  jpeg_crop_scanline(&info, &first, &wide);
  if (top) jpeg_skip_scanlines(&info, top);
  *width = info.output_width;
  for (int row = 0; row < rows; row++) {
    JSAMPROW line = out + (size_t)row * info.output_width * 3;
    jpeg_read_scanlines(&info, &line, 1);
  }
  jpeg_destroy_decompress(&info);
  return left - (int)first;
}

/* Coefficients only; returns 0, or -1. */
int decode_entropy(const unsigned char *data, size_t size) {
  struct jpeg_decompress_struct info;
  struct failing error;
  if (setjmp(error.back)) {
    jpeg_destroy_decompress(&info);
    return -1;
  }
  begin(&info, &error, data, size);
  jpeg_read_header(&info, TRUE);
  jpeg_read_coefficients(&info);
  jpeg_destroy_decompress(&info);
  return 0;
}
