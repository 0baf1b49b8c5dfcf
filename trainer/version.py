"""The package's version, and that of its arithmetic: of its own, so that every room can say them."""

__version__ = "0.2.0"

# The newest number is that of every run that begins now. It rises when the same recipe, data and stack give
# other bits than before; the changelog has the same numbers.
ARITHMETIC_CHANGES = {
    2: "BatchNorm's statistics follow each call of a layer; what a forward pass moves beside its gradients "
    "moves once a step; parts in evaluation mode stay so; weights that share memory are averaged as one",
    3: "a training cut of a JPEG that is decoded at a part of its size is the nearest to the one that was "
    "drawn, not one to its top left; images of `datasets` are turned as EXIF says",
    4: "training cuts of image files that don't fit are drawn again, and evaluation resizes before it cuts, "
    "as torchvision does; stochastic depth keeps the proportions of torchvision's models that bring it",
    5: "logits of more than 2^27 numbers in a micro-batch, but in fp16, are summed to a loss in pieces",
    6: "LoRA acts on linear layers whose weight is read and that are never called (swin, beit); the average "
    "of a run that is extended doesn't count steps twice; on a GPU attention does without cuDNN's kernels "
    "(torch takes them from 2.11 on), and compiled code without reductions in mixed order (from 2.10 on) and "
    "random numbers by four (from 2.13 on)",
    7: "a turn of several tool calls, each with its mark, ends with the last of them",
    8: "with anomaly.nonfinite=skip the loss of a record is the mean of the steps that were made, and null "
    "where there are none; the weights are as before",
    9: "a custom task gives a value for each sample, which the trainer adds up: losses and figures differ by "
    "rounding, and weights where not all counts; a trial leaves numpy's and Python's generators as they were",
    10: "compiled code keeps the copy of a buffer that a forward pass changes afterwards, such as a queue of "
    "keys: before, what was computed from the copy, and its gradient, were wrong; others keep their bits",
    11: "compiled code, and activation checkpointing, compute backward from buffers as they were before the "
    "forward pass changed them; compiled code isn't taken from caches of another precision or number of "
    "threads; averages of weights in half precision are in float32; corrections by what counts are in each "
    "gradient's own dtype; others keep their bits",
    12: "compiled code changes no buffer before, or while, it is read at other places, and reads what is "
    "scattered (scatter_add, an assignment by index) afterwards: before, a codebook, a queue or what was "
    "computed from it could be wrong; others keep their bits",
    13: "compiled code updates float64 buffers without dimensions (a largest value, a scale), which stood "
    "still; activation checkpointing leaves a teacher as it is before the first step, which it updated twice "
    "more; others keep their bits",
}
ARITHMETIC = max(ARITHMETIC_CHANGES)
